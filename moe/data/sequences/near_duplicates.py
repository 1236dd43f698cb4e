"""Documents that say what others have said, found by the hashes of their lines."""

import hashlib

MIN_LINE_CHARS = 12
"""Shorter lines (`else:`, `return self`) are in every file, and say nothing of where it comes from."""
MAX_SEEN = 0.5
"""Share of a document's distinct lines that others may have, and less."""


def lines_of(text: str) -> frozenset[bytes]:
    """Hashes of a document's distinct lines as they count: without indentation, comments, and short ones."""
    lines = {line.strip() for line in text.split("\n")}
    return frozenset(
        hashlib.blake2b(line.encode("utf-8", "replace"), digest_size=8).digest()
        for line in lines
        if len(line) >= MIN_LINE_CHARS and not line.startswith("#")
    )


class SeenLines:
    """Lines of the documents so far."""

    def __init__(self) -> None:
        self._line_hashes: set[bytes] = set()

    def add(self, lines: frozenset[bytes]) -> None:
        self._line_hashes |= lines

    def has_most_of(self, lines: frozenset[bytes]) -> bool:
        """Whether half of a document's lines are there; one of none is nothing new either."""
        return len(lines & self._line_hashes) >= MAX_SEEN * len(lines)
