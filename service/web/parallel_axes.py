"""Parallel coordinates: an axis for each field of a sweep and one for its metric, and a line for each member."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from service.web.field_text import LOG_RATIO, is_number, short_name, tick_text, words_of
from service.web.formats import number

WIDTH = 1240
"""Width that axes share, between the smallest and the largest gap."""
MIN_GAP, MAX_GAP = 190, 420
HEIGHT, TOP, BOTTOM = 300, 44, 24
SIDE = 90
MAX_TICKS = 12
MIN_TICK_GAP = 16
NUM_GOOD = 4


@dataclass(frozen=True)
class Axis:
    name: str
    x: float
    ticks: Sequence[tuple[float, str]]
    """(height, text)."""
    is_last: bool


@dataclass(frozen=True)
class Line:
    member: Mapping[str, Any]
    points: str
    """Of an SVG polyline."""
    rank: str
    """`best`, `good`, `other`, or `none` without a value."""
    words: str
    """Values of the member, for a tooltip."""


@dataclass(frozen=True)
class Axes:
    width: float
    height: float
    axes: Sequence[Axis]
    lines: Sequence[Line]
    """The best last, so that it is drawn above the others."""


def parallel_axes(sweep: Mapping[str, Any]) -> Axes | None:
    """Picture of a sweep's members, the best first in `sweep`; None while there is no value."""
    members = sweep["members"]
    if all(member["value"] is None for member in members):
        return None
    columns = [[member["values"].get(path) for member in members] for path in sweep["fields"]]
    names = [*map(short_name, sweep["fields"]), sweep["metric"]]
    places = [_place(column) for column in columns]
    metric = _place([member["value"] for member in members if member["value"] is not None])
    gap = min(MAX_GAP, max(MIN_GAP, (WIDTH - 2 * SIDE) / len(columns)))
    axes = [
        Axis(name, round(SIDE + index * gap), scale.ticks, index == len(names) - 1)
        for index, (name, scale) in enumerate(zip(names, [*places, metric], strict=True))
    ]
    lines = []
    for rank, member in enumerate(members):
        heights = [scale.height_of(column[rank]) for scale, column in zip(places, columns, strict=True)]
        if member["value"] is not None:
            heights.append(metric.height_of(member["value"]))
        points = " ".join(f"{axis.x:g},{height:.1f}" for axis, height in zip(axes, heights, strict=False))
        lines.append(Line(member, points, _rank(rank, member), words_of(member, sweep["metric"])))
    return Axes(axes[-1].x + SIDE, HEIGHT, axes, lines[::-1])


@dataclass(frozen=True)
class _Scale:
    """Heights of the values of an axis."""

    ticks: Sequence[tuple[float, str]]
    numbers: tuple[float, float] | None
    """Ends of a numeric axis."""
    is_log: bool
    choices: Mapping[str, float]
    """Heights by JSON text, of an axis without numbers."""

    def height_of(self, value: Any) -> float:
        """Height of a value of the axis."""
        if self.numbers is None:
            return self.choices[json.dumps(value, sort_keys=True)]
        low, high = map(float, self.numbers)
        if high == low:
            return (TOP + HEIGHT - BOTTOM) / 2
        amount = float(value)
        if self.is_log:
            low, high, amount = math.log(low), math.log(high), math.log(amount)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (amount - low) / (high - low)


def _place(values: Sequence[Any]) -> _Scale:
    if all(map(is_number, values)):
        low, high = min(values), max(values)
        is_log = low > 0 and high / low >= LOG_RATIO
        scale = _Scale((), (low, high), is_log, {})
        distinct = sorted(set(values))
        heights = [scale.height_of(value) for value in distinct]
        if any(below - above < MIN_TICK_GAP for below, above in pairwise(heights)):
            middle = math.sqrt(low * high) if is_log else (low + high) / 2
            distinct = [low, middle, high]
        return _Scale([(scale.height_of(value), number(value)) for value in distinct], (low, high), is_log, {})
    keys = list(dict.fromkeys(json.dumps(value, sort_keys=True) for value in values))
    gap = (HEIGHT - TOP - BOTTOM) / max(1, len(keys) - 1)
    choices = {key: HEIGHT - BOTTOM - index * gap for index, key in enumerate(keys)}
    ticks = [(height, tick_text(json.loads(key))) for key, height in list(choices.items())[:MAX_TICKS]]
    return _Scale(ticks, None, False, choices)


def _rank(rank: int, member: Mapping[str, Any]) -> str:
    if member["value"] is None:
        return "none"
    return "best" if rank == 0 else "good" if rank < NUM_GOOD else "other"
