"""Combinations of values that a sweep tries: a grid, or draws that depend on nothing but its seed."""

import json
import math
from collections.abc import Iterator
from hashlib import sha256
from itertools import product
from typing import Any

from moe.spec.errors import SpecError, spec_error
from moe.spec.sweep.spec import SweepFieldSpec, SweepSpec

MAX_DRAWS = 1000
"""Draws of one member until its values differ from those of all earlier ones."""


def combinations(sweep: SweepSpec) -> list[dict[str, Any]]:
    """Values by field of each member, all different. Raises SpecError if ranges have too few values."""
    if not sweep.is_drawn:
        grids = [_grid_values(field) for field in sweep.fields.values()]
        return [dict(zip(sweep.fields, values, strict=True)) for values in product(*grids)]
    drawn: dict[str, dict[str, Any]] = {}
    for number in range(1, sweep.num_members + 1):
        for values in _draws(sweep, number):
            if (key := json.dumps(values, sort_keys=True)) not in drawn:
                drawn[key] = values
                break
        else:
            raise _too_few(sweep)
    return list(drawn.values())


def _draws(sweep: SweepSpec, number: int) -> Iterator[dict[str, Any]]:
    for attempt in range(MAX_DRAWS):
        yield {
            path: value_at(field, _uniform(f"{sweep.seed}/{number}/{attempt}/{path}"))
            for path, field in sweep.fields.items()
        }


def _too_few(sweep: SweepSpec) -> SpecError:
    return spec_error("out_of_range", "sweep.num_jobs", sweep.num_jobs, "exceeds the combinations of values",
                      "lower it, widen a range, or use method: grid")  # fmt: skip


def _uniform(key: str) -> float:
    """Uniform draw from [0, 1) by key: another field or member does not change it."""
    return (int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 11) / 2**53


def _grid_values(field: SweepFieldSpec) -> list[Any]:
    if field.values is not None:
        return list(field.values)
    assert field.num_values is not None, "checked by SweepSpec"
    return list(dict.fromkeys(_on_scale(field, place / (field.num_values - 1)) for place in range(field.num_values)))


def value_at(field: SweepFieldSpec, fraction: float) -> Any:
    """Value of a field at a fraction in [0, 1) of its list or range."""
    if field.values is not None:
        return field.values[int(fraction * len(field.values))]
    if field.scale == "linear" and field.multiple_of is None and _is_whole(field):
        low, high = field.ends
        return int(low + int(fraction * (high - low + 1)))  # each whole number is as likely
    return _on_scale(field, fraction)


def _on_scale(field: SweepFieldSpec, fraction: float) -> int | float:
    """Value at a fraction of the way from `min` to `max`, as whole number or multiple if the field has these."""
    low, high = map(float, field.ends)
    if field.scale == "log":
        value = math.exp(math.log(low) + fraction * (math.log(high) - math.log(low)))
    else:
        value = low + fraction * (high - low)
    if (unit := field.multiple_of) is not None:
        multiple = min(max(round(value / unit), math.ceil(low / unit)), math.floor(high / unit))
        value = multiple * unit
    elif not _is_whole(field):
        value = min(max(_shortened(value, high - low), low), high)
    return round(min(max(value, low), high)) if _is_whole(field) else value


def _is_whole(field: SweepFieldSpec) -> bool:
    return all(isinstance(end, int) or end is None for end in (field.min, field.max)) and (
        field.multiple_of is None or float(field.multiple_of).is_integer()
    )


def _shortened(value: float, span: float) -> float:
    """The value to four digits of itself, or of the range if that is smaller."""
    smallest = min(span, abs(value)) or span
    return round(value, 3 - math.floor(math.log10(smallest)))
