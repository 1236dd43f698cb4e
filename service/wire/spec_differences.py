"""Fields in which job specs differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

UNCOMPARED = frozenset({"name", "labels", "storage"})
"""Fields that say which job it is, not what it does."""
ABSENT = ...
"""In place of the value of a field that a spec does not have."""


def spec_differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Values of each field that is not the same in all plain specs, by path, in the order of the specs; `ABSENT` where
    a spec does not have it. Lists are compared as a whole."""
    flat_specs = [dict(_leaves("", {key: spec[key] for key in spec if key not in UNCOMPARED})) for spec in specs]
    paths = dict.fromkeys(path for flat in flat_specs for path in flat)
    rows = {path: [flat.get(path, ABSENT) for flat in flat_specs] for path in paths}
    return {path: values for path, values in rows.items() if any(value != values[0] for value in values[1:])}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), child)
    else:
        yield path, value
