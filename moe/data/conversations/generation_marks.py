"""`{% generation %}`: what a chat template marks as said by the assistant, as transformers reads it."""

import secrets
from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from moe.data.conversations.conversation import RenderedText

_SIGN_BYTES = 12


class GenerationMarks(Extension):
    """Writes a sign before and behind each marked part, which no text of a user can know; `strip_marks` takes them
    out."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def __init__(self, environment: object) -> None:
        super().__init__(environment)  # type: ignore[arg-type]
        self.is_used = False
        """Whether the template that was compiled has any mark."""
        self._begin, self._end = (f"\x02{secrets.token_hex(_SIGN_BYTES)}\x03" for _ in range(2))

    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Callable[[], str]) -> str:
        return f"{self._begin}{caller()}{self._end}"

    def strip_marks(self, text: str) -> RenderedText:
        """The rendered text without its signs, and the stretches that they were around, empty ones too. Marks within
        marks are one."""
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
