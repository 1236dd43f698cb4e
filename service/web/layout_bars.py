"""Layouts of a plan as bars: for each, a bar of a step's time and one of the fullest device's memory, by kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe.plan import Plan
from moe.plan.picture import LayoutRow, rows_of
from moe.plan.quantities import format_bytes, format_seconds, time_kind_name

BAR_UNITS = 1000
"""Width of the longest bar."""


@dataclass(frozen=True)
class Segment:
    """Part of a bar, in units of its width."""

    kind: str
    """A field of the plan's times or memory, which the style sheet has a colour for."""
    words: str
    start: float
    width: float


@dataclass(frozen=True)
class Bar:
    """Amounts of a layout, one after the other, with their total in words."""

    total: str
    segments: Sequence[Segment]
    limit: float | None
    """Place of the device's memory limit; None beyond the bar, or for times."""

    @property
    def end(self) -> float:
        return max((segment.start + segment.width for segment in self.segments), default=0.0)


@dataclass(frozen=True)
class Layout:
    """A layout of the picture."""

    words: str
    status: str
    is_chosen: bool
    time: Bar
    memory: Bar


@dataclass(frozen=True)
class LayoutBars:
    """Layouts, the chosen one first, on common scales."""

    layouts: Sequence[Layout]
    time_kinds: Mapping[str, str]
    """Kinds that occur, with their names: the legend."""
    memory_kinds: Mapping[str, str]


def layout_bars(plan: Plan) -> LayoutBars:
    """Bars of the layouts of a job's plan. Raises SpecError for a module's, which has a single layout."""
    rows = rows_of(plan)
    times: list[Mapping[str, float]] = [row.time or {"unknown": row.step_s or 0.0} for row in rows]
    memories: list[Mapping[str, float]] = [row.memory or {"unknown": row.memory_bytes or 0} for row in rows]
    longest = max(sum(amounts.values()) for amounts in times)
    fullest = max(sum(amounts.values()) for amounts in memories)
    layouts = [
        _layout(row, time, memory, longest, fullest, is_chosen=index == 0)
        for index, (row, time, memory) in enumerate(zip(rows, times, memories, strict=True))
    ]
    return LayoutBars(layouts, _legend(times), _legend(memories))


def _layout(
    row: LayoutRow, time: Mapping[str, float], memory: Mapping[str, float], longest: float, fullest: float,
    *, is_chosen: bool,
) -> Layout:  # fmt: skip
    limit = BAR_UNITS * row.limit / fullest if fullest and row.limit <= fullest else None
    return Layout(
        row.layout,
        row.status,
        is_chosen,
        Bar("not recorded" if row.step_s is None else format_seconds(row.step_s),
            _segments(time, longest, format_seconds), None),
        Bar("not recorded" if row.memory_bytes is None else format_bytes(row.memory_bytes),
            _segments(memory, fullest, lambda amount: format_bytes(int(amount))), limit),
    )  # fmt: skip


def _segments(amounts: Mapping[str, float], longest: float, in_words: Callable[[float], str]) -> list[Segment]:
    scale = BAR_UNITS / longest if longest > 0 else 0.0
    segments: list[Segment] = []
    start = 0.0
    for kind, amount in amounts.items():
        if amount > 0:
            width = round(amount * scale, 2)
            segments.append(Segment(kind, f"{time_kind_name(kind)}: {in_words(amount)}", round(start, 2), width))
            start += width
    return segments


def _legend(all_amounts: Sequence[Mapping[str, float]]) -> dict[str, str]:
    return {
        kind: time_kind_name(kind)
        for amounts in all_amounts
        for kind, amount in amounts.items()
        if amount > 0
    }  # fmt: skip
