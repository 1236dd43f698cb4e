"""Name patterns, in which `*` matches any characters, or none."""

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def layer_pattern(name: str) -> str:
    """The name with `*` for layer numbers."""
    return _NUMBER.sub("*", name)


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern matches the whole name. Linear time: each part is matched at its first occurrence, which
    leaves the most text for the rest."""
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
