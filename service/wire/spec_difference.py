"""Fields in which job specs differ."""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

ABSENT = object()
"""In place of the value of a field that a spec does not have."""
IDENTITY = frozenset({"name", "labels", "storage"})
"""Fields that say which job it is, not what it does."""
VERBATIM = frozenset({"hints", "options", "pod_template", "template_arguments"})
"""Fields whose values go unchanged to code outside this project, to which 1 and 1.0 are two values. Elsewhere a number
has the type of its field, and an older release may have stored the other one."""


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


def is_same(value: Any, other: Any, verbatim: bool = False) -> bool:
    """Whether two values of a field mean the same. `true` is never 1, as it is to Python; 1 and 1.0 are one number,
    except in a `verbatim` field."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            is_same(value[key], other[key], verbatim or key in VERBATIM) for key in value
        )
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(
            is_same(element, element_of_other, verbatim) for element, element_of_other in zip(value, other, strict=True)
        )
    types = {type(value), type(other)}
    is_one_type = len(types) == 1 or (types == {int, float} and not verbatim)
    return bool(is_one_type and value == other)


def is_verbatim(path: str) -> bool:
    """Whether a path leads into a field of `VERBATIM`."""
    return not VERBATIM.isdisjoint(path.split("."))


def job_file_text(value: Any) -> str:
    """A field's value as a job file has it, on one line: text in quotes only where it would read as another value. A
    dash for `ABSENT`."""
    if value is ABSENT:
        return "–"
    return value if isinstance(value, str) and not _is_json(value) else json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _differences(path: str, values: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from _differences(f"{path}.{key}" if path else key, [value.get(key, ABSENT) for value in values])
    elif all(_are_records(value) and len(value) == len(values[0]) for value in values):
        for index, elements in enumerate(zip(*values, strict=True)):
            yield from _differences(f"{path}.{index}", list(elements))
    elif not all(is_same(value, values[0], is_verbatim(path)) for value in values[1:]):
        yield path, values


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)
