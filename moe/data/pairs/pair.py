"""One translation pair."""

from typing import NamedTuple


class Pair(NamedTuple):
    """A text, its translation, and the language of the text."""

    lang: str
    source: str
    target: str
