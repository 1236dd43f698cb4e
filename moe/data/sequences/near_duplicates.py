"""Near-duplicate documents, found by hashes of their lines."""

import hashlib

MIN_LINE_CHARS = 12
"""Shorter lines (`else:`, `return self`) are in every file, and say nothing of where it comes from."""
MAX_SEEN = 0.5
"""Share of a document's distinct lines in others from which it is a near duplicate."""


def lines_of(text: str) -> frozenset[bytes]:
    """Hashes of a document's distinct lines, without indentation, comments and short lines."""
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
        """Whether at least half of these lines have been seen; true of no lines."""
        return len(lines & self._line_hashes) >= MAX_SEEN * len(lines)
