"""Makes untrusted text (corpora, workers, users) safe to print on a terminal."""

import unicodedata

_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """`text` on one line, with spaces for control characters, which could forge output."""
    return "".join(" " if _controls(character) else character for character in text).strip()


def printable_lines(text: str) -> str:
    """`text` with line breaks and tabs; other control characters become spaces."""
    return "".join(" " if _controls(character) and character not in "\n\t" else character for character in text)


def _controls(character: str) -> bool:
    return character in _BIDI_CONTROLS or unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")
