"""Scatter plot of a sweep over two fields: a point for each member, coloured by its metric."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from service.web.field_text import LOG_RATIO, is_number, short_name, tick_text, words_of
from service.web.formats import number

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 110, 40, 24, 64
PADDING = 0.06
"""Share of an axis between its ends and its outermost values."""
MIN_TICK_GAP_X, MIN_TICK_GAP_Y = 62, 18
NUM_SHADES = 5
MAX_LABELS = 40
"""Members above which only the best are labelled: more labels would cover each other."""
NUM_LABELLED = 5


@dataclass(frozen=True)
class Point:
    member: Mapping[str, Any]
    x: float
    y: float
    shade: str
    """`1` (the best) to `5`, or `none` without a value."""
    is_best: bool
    label: str
    """Metric beside the point; empty where it would cover others."""
    words: str


@dataclass(frozen=True)
class PlotAxis:
    name: str
    is_log: bool
    ticks: Sequence[tuple[float, str]]
    """(place, text)."""


@dataclass(frozen=True)
class ScatterPlot:
    x: PlotAxis
    y: PlotAxis
    points: Sequence[Point]
    """In reading order of the keyboard: the best first."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def scatter_plot(sweep: Mapping[str, Any]) -> ScatterPlot | None:
    """Plot of a sweep, whose members come the best first; None unless it has two fields and a value."""
    members = [member for member in sweep["members"] if all(path in member["values"] for path in sweep["fields"])]
    num_valued = sum(member["value"] is not None for member in members)
    if len(sweep["fields"]) != 2 or not num_valued:
        return None
    x_path, y_path = sweep["fields"]
    x = _Scale.from_values([member["values"][x_path] for member in members], LEFT, WIDTH - RIGHT)
    y = _Scale.from_values([member["values"][y_path] for member in members], HEIGHT - BOTTOM, TOP)
    points = []
    for rank, member in enumerate(members):
        has_value = member["value"] is not None
        is_labelled = has_value and (num_valued <= MAX_LABELS or rank < NUM_LABELLED)
        points.append(
            Point(
                member,
                x.place_of(member["values"][x_path]),
                y.place_of(member["values"][y_path]),
                str(1 + NUM_SHADES * rank // num_valued) if has_value else "none",
                has_value and rank == 0,
                number(member["value"]) if is_labelled else "",
                words_of(member, sweep["metric"]),
            )
        )
    return ScatterPlot(
        PlotAxis(short_name(x_path), x.is_log, x.ticks(MIN_TICK_GAP_X)),
        PlotAxis(short_name(y_path), y.is_log, y.ticks(MIN_TICK_GAP_Y)),
        points,
    )


@dataclass(frozen=True)
class _Scale:
    """Places of the values of an axis, from `start` to `end`."""

    values: Sequence[Any]
    """Distinct values, numbers in order."""
    start: float
    end: float
    is_numeric: bool
    is_log: bool

    @classmethod
    def from_values(cls, values: Sequence[Any], start: float, end: float) -> "_Scale":
        if all(map(is_number, values)):
            distinct = sorted(set(map(float, values)))
            is_log = distinct[0] > 0 and distinct[-1] / distinct[0] >= LOG_RATIO
            return cls(distinct, start, end, True, is_log)
        keys = dict.fromkeys(json.dumps(value, sort_keys=True) for value in values)
        return cls(list(keys), start, end, False, False)

    def place_of(self, value: Any) -> float:
        if self.is_numeric:
            low, high, amount = self.values[0], self.values[-1], float(value)
            if self.is_log:
                low, high, amount = math.log(low), math.log(high), math.log(amount)
            share = 0.5 if low == high else (amount - low) / (high - low)
        else:
            index = self.values.index(json.dumps(value, sort_keys=True))
            share = 0.5 if len(self.values) == 1 else index / (len(self.values) - 1)
        return round(self.start + (self.end - self.start) * (PADDING + (1 - 2 * PADDING) * share), 1)

    def ticks(self, min_gap: float) -> list[tuple[float, str]]:
        """Every value where there is room; else powers of ten, or the ends and the middle."""
        if not self.is_numeric:
            ticks = [(self.place_of(json.loads(key)), tick_text(json.loads(key))) for key in self.values]
            step = next(step for step in range(1, len(ticks) + 1) if _have_room(ticks[::step], min_gap))
            return ticks[::step]
        low, high = self.values[0], self.values[-1]
        candidates = [self.values]
        if self.is_log:
            powers = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
            candidates += [powers] if len(powers) > 1 else []
        candidates.append([low, math.sqrt(low * high) if self.is_log else (low + high) / 2, high])
        choices = [[(self.place_of(value), number(value)) for value in values] for values in candidates]
        return next((choice for choice in choices if _have_room(choice, min_gap)), choices[-1])


def _have_room(ticks: Sequence[tuple[float, str]], min_gap: float) -> bool:
    return all(abs(after[0] - before[0]) >= min_gap for before, after in pairwise(ticks))
