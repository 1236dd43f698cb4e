"""Swept fields and their values as text on the axes of pictures."""

import json
from typing import Any

from service.web.formats import number

LOG_RATIO = 30
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
MAX_TICK_CHARS = 18


def short_name(path: str) -> str:
    """`peak_lr` of `train.optimizer.peak_lr`."""
    return path.rpartition(".")[2]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return number(value) if is_number(value) else json.dumps(value, ensure_ascii=False)


def tick_text(value: Any) -> str:
    """Text of a value, cut to the room beside an axis."""
    text = value_text(value)
    return text if len(text) <= MAX_TICK_CHARS else f"{text[: MAX_TICK_CHARS - 1]}…"


def words_of(member: Any, metric: str) -> str:
    """A member's values and metric, for a tooltip."""
    values = ", ".join(f"{short_name(path)} {value_text(value)}" for path, value in member["values"].items())
    return f"{member['name'] or member['job']}: {values}; {metric} {number(member['value'])}"
