"""`{% generation %}`: marks of the assistant's text in a chat template, as transformers reads them."""

import secrets
from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from moe.data.conversations.conversation import RenderedText

_SIGN_BYTES = 12


class GenerationMarks(Extension):
    """Writes a random marker, which no user's text can contain, before and after each marked part; `strip_marks`
    removes them."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def __init__(self, environment: object) -> None:
        super().__init__(environment)  # type: ignore[arg-type]
        self.is_used = False
        """Whether the compiled template has any mark."""
        self._begin, self._end = (f"\x02{secrets.token_hex(_SIGN_BYTES)}\x03" for _ in range(2))

    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Callable[[], str]) -> str:
        return f"{self._begin}{caller()}{self._end}"

    def strip_marks(self, text: str) -> RenderedText:
        """The rendered text without markers, and the spans between them, empty ones too. Nested marks count as one."""
        plain, spans, depth, begins = "", list[tuple[int, int]](), 0, 0
        pieces = text.split(self._begin)
        for number, piece in enumerate(pieces):
            if number:
                begins = begins if depth else len(plain)
                depth += 1
            for place, part in enumerate(piece.split(self._end)):
                if place and depth:
                    depth -= 1
                    if not depth:
                        spans.append((begins, len(plain)))
                plain += part
        return RenderedText(plain, tuple(spans), by_marks=True)
