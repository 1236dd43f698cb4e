"""Plain templates: text with document columns, `{{column}}` or `{{column | lower}}`.

They mean the same as in Jinja, which lm-evaluation-harness renders with. All other Jinja syntax is refused, so that
no template computes, calls or reads anything.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FILTERS: Mapping[str, Callable[[str], str]] = {
    "capitalize": str.capitalize,
    "lower": str.lower,
    "trim": str.strip,
    "upper": str.upper,
}
RULE = f"must be text with columns, {{{{column}}}} or {{{{column | FILTER}}}} (FILTER: {', '.join(FILTERS)})"
REMEDY = "add computed values as a column of the data files"

_OPENING = re.compile(r"\{[{%#]")
_SUBSTITUTION = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)((?:\s*\|\s*[a-z]+)*)\s*\}\}")
_JINJA_KEYWORDS = frozenset(
    {"True", "False", "None", "true", "false", "none", "and", "or", "not", "in", "is", "if", "else", "self"}
)
"""Jinja keywords, which cannot be column names."""
_LINE_END = re.compile(r"\r\n|\r|\n")


class NotPlain(ValueError):
    """Template with more than columns; the message shows where."""


@dataclass(frozen=True)
class Substitution:
    """Column value, passed through filters."""

    column: str
    filters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Template:
    """Parsed template."""

    parts: tuple[str | Substitution, ...]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parse a template. Raises NotPlain."""
        text, parts, position = _LINE_END.sub("\n", text), list[str | Substitution](), 0  # as Jinja does
        while (opening := _OPENING.search(text, position)) is not None:
            match = _SUBSTITUTION.match(text, opening.start())
            filters = () if match is None else tuple(name.strip() for name in match[2].split("|")[1:])
            if match is None or match[1] in _JINJA_KEYWORDS or not FILTERS.keys() >= set(filters):
                raise NotPlain(text[opening.start() : opening.start() + 40])
            parts += [text[position : opening.start()], Substitution(match[1], filters)]
            position = match.end()
        return cls(tuple(part for part in (*parts, text[position:]) if part))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(part.column for part in self.parts if isinstance(part, Substitution))

    def render(self, document: Mapping[str, str | int | float]) -> str:
        """Text for a document, which must have all columns."""
        return "".join(part if isinstance(part, str) else _value(part, document) for part in self.parts)


def _value(part: Substitution, document: Mapping[str, str | int | float]) -> str:
    text = str(document[part.column])
    for name in part.filters:
        text = FILTERS[name](text)
    return text
