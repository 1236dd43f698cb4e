"""Fields in which job specs differ."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

ABSENT = object()
"""In place of the value of a field that a spec does not have."""
IDENTITY = frozenset({"name", "labels", "storage"})
"""Fields that say which job it is, not what it does."""


def spec_differences(specs: Sequence[Any], without: Collection[str] = IDENTITY) -> dict[str, list[Any]]:
    """Values of each field that is not the same in all specs, by path, in the order of the specs; `ABSENT` where a
    spec does not have it. Lists are compared as wholes unless all are of objects and equally long."""
    compared = [
        {key: value for key, value in spec.items() if key not in without} if isinstance(spec, dict) else spec
        for spec in specs
    ]
    return dict(_differences("", compared))


def spec_difference(spec: Any, other: Any) -> list[dict[str, Any]]:
    """`path`, `value` and `other` of each field that differs, in order of the first spec; null: not in that spec."""
    differences = spec_differences([spec, other], without=())
    return [
        {"path": path, "value": None if a is ABSENT else a, "other": None if b is ABSENT else b}
        for path, (a, b) in differences.items()
    ]


def _differences(path: str, values: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from _differences(f"{path}.{key}" if path else key, [value.get(key, ABSENT) for value in values])
    elif all(_are_records(value) and len(value) == len(values[0]) for value in values):
        for index, elements in enumerate(zip(*values, strict=True)):
            yield from _differences(f"{path}.{index}", list(elements))
    elif any(value != values[0] or type(value) is not type(values[0]) for value in values[1:]):  # 1 == True
        yield path, values


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)
