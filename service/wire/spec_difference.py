"""Fields in which two job specs differ."""

from collections.abc import Iterator
from typing import Any

_MISSING = object()


def spec_difference(spec: Any, other: Any) -> list[dict[str, Any]]:
    """`path`, `value` and `other` of each field that differs, in order of the first spec; null: not in that spec.
    Lists are compared as wholes unless both are of objects and equally long."""
    return [
        {"path": path, "value": None if a is _MISSING else a, "other": None if b is _MISSING else b}
        for path, a, b in _differences("", spec, other)
    ]


def _differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _differences(f"{path}.{key}" if path else key, a.get(key, _MISSING), b.get(key, _MISSING))
    elif _are_records(a) and _are_records(b) and len(a) == len(b):
        for index, (one, two) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{path}.{index}", one, two)
    elif a != b or type(a) is not type(b):  # 1 == True
        yield path, a, b


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)
