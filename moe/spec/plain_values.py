"""Plain values: those that JSON can express, within limits. YAML files and callers may bring others."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from moe.spec.errors import Problem

MAX_VALUES, MAX_DEPTH = 10_000, 32
_MAX_INTEGER = 2**63 - 1


def first_problem(value: Any, path: str) -> Problem | None:
    """First value that JSON cannot express, or that exceeds the limits (also by YAML's references); None for plain
    values."""
    return next(_problems(value, path, [MAX_VALUES], 0), None)


def _problems(value: Any, path: str, budget: list[int], depth: int) -> Iterator[Problem]:
    budget[0] -= 1
    if budget[0] < 0 or depth > MAX_DEPTH:
        rule = f"must have at most {MAX_VALUES} values and {MAX_DEPTH} levels"
        yield Problem("too_large", path, None, rule, "shorten it")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or not _is_text(key):
                yield Problem("wrong_type", path, None, f"must have text as keys, not {key!r}", "quote it")
                return
            yield from _problems(item, f"{path}.{key}", budget, depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _problems(item, f"{path}[{index}]", budget, depth + 1)
    elif isinstance(value, str):
        if not _is_text(value):
            yield Problem("invalid_encoding", path, None, "must be valid UTF-8 without NUL", "correct it")
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield Problem("not_finite", path, str(value), "must be a finite number", "use a finite number")
    elif isinstance(value, int):  # also a bool
        if abs(value) > _MAX_INTEGER:
            yield Problem("out_of_range", path, None, "must fit in 64 bits", "lower it")
    elif value is not None:
        yield Problem("wrong_type", path, str(value), "must be text, a number, a list or a mapping", "quote it")


def _is_text(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
