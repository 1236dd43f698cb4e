"""Names by patterns: `*` stands for any characters, also none, and every other character for itself."""

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def starred(name: str) -> str:
    """The name with `*` in place of numbers of layers."""
    return _NUMBER.sub("*", name)


def matches(pattern: str, name: str) -> bool:
    """Whether the whole name is as the pattern says, in a time that grows with their lengths alone.

    Each piece between two stars is taken where it comes first: if any place will do, that one leaves most to the rest.
    """
    first, *middle = pattern.split("*")
    if not middle:
        return name == pattern
    last = middle.pop()
    end = len(name) - len(last)
    if len(first) > end or not (name.startswith(first) and name.endswith(last)):
        return False
    start = len(first)
    for piece in middle:
        position = name.find(piece, start, end)
        if position < 0:
            return False
        start = position + len(piece)
    return True
