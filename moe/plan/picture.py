"""SVG picture of a job's best layouts: step time and memory by kind. Equal plans give equal bytes."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from moe.plan.candidate import Options
from moe.plan.degrees import Degrees
from moe.plan.plan import MemoryEstimate, Plan
from moe.plan.profile import EXECUTORS
from moe.plan.search.explain import kind_of_time, layout_of, seconds_of, size_of
from moe.plan.svg import (
    BLUES,
    GREENS,
    INK,
    LINE,
    MARGIN,
    MEMORY,
    OCHRES,
    PALE_INK,
    PAPER,
    RULE,
    WIDTH,
    Svg,
    text_width,
)
from moe.spec import Problem, SpecError

_GREY, _PALE_GREY, _LIMIT = "#8c959f", "#b8bfc7", "#b3261e"
_TIME = {
    "products_s": BLUES[0], "attention_s": BLUES[1], "routing_s": BLUES[2], "elementwise_s": BLUES[3],
    "launches_s": "#d3e3f7", "all_to_all_s": OCHRES[0], "gather_s": OCHRES[1], "send_s": OCHRES[2],
    "all_reduce_s": OCHRES[3], "bubble_s": _GREY, "data_s": _PALE_GREY, "optimizer_s": GREENS[1],
}  # fmt: skip
"""Computation blue, communication ochre, waiting grey."""
_BYTES = {
    "parameters": MEMORY[0], "gradients": MEMORY[1], "optimizer": MEMORY[2], "activations": MEMORY[3],
    "workspace": "#dcc06a", "logits": "#ecdcaa", "dispatch": MEMORY[4], "communication": MEMORY[5],
    "staging": "#c3d9d7",
}  # fmt: skip
"""State violet, activations yellow, communication teal."""

_NAMED, _BAR, _FIGURES = 268, 20, 92
"""Widths of names and figures, height of a bar."""
_BARS = MARGIN + _NAMED + 62
_ROOM = WIDTH - MARGIN - _FIGURES - _BARS


@dataclass(frozen=True)
class LayoutRow:
    """One layout. `time` and `memory` are None if an old plan has only totals."""

    layout: str
    beside: str
    step_s: float | None
    memory_bytes: int | None
    time: Mapping[str, float] | None
    memory: Mapping[str, int] | None
    limit: int


def draw_svg(plan: Plan) -> str:
    """Draw a row per layout, the chosen one first, with a bar of time and one of memory, each kind on one scale.
    Raises SpecError for a module's plan, which has a single layout."""
    if plan.module is not None:
        raise SpecError(
            Problem(
                "not_applicable",
                "module",
                None,
                "has no layouts to draw side by side",
                "draw it with --module",
            )
        )
    rows, svg = rows_of(plan), Svg(f"Layouts of a job on {plan.num_workers:,} x {plan.device_type}")
    y = _legend(svg, plan, rows, _head(svg, plan, len(rows)))
    longest = max((row.step_s for row in rows if row.step_s), default=0.0)
    max_bytes = max(*(row.limit for row in rows), *(row.memory_bytes or 0 for row in rows))
    for place, row in enumerate(rows, start=1):
        y = _row(svg, row, place, y, longest, max_bytes, row.limit)
    return svg.text(y + MARGIN - 8)


def rows_of(plan: Plan) -> list[LayoutRow]:
    """Return the rows of the picture, the chosen layout first."""
    status = f"chosen, but cannot be run yet: {', '.join(plan.not_yet)}" if plan.not_yet else "chosen"
    rows = [
        LayoutRow(_in_words(layout_of(plan)), status, plan.predicted.step_s, plan.memory.needed,
            plan.predicted.by_kind(), _job_memory(plan.memory), plan.memory.limit)
    ]  # fmt: skip
    for runner_up in plan.runners_up:
        time, memory = runner_up.predicted, runner_up.memory
        rows.append(
            LayoutRow(_in_words(runner_up.layout), runner_up.why_not, runner_up.step_s,
                runner_up.memory_bytes if memory is None else memory.needed,
                None if time is None else time.by_kind(), None if memory is None else _job_memory(memory),
                plan.memory.limit if memory is None else memory.limit)
        )  # fmt: skip
    return rows


def _job_memory(memory: MemoryEstimate) -> dict[str, int]:
    """Bytes by kind, without the allowance."""
    return {kind: amount for kind, amount in memory.by_kind().items() if kind != "allowance"}


_ORDER = [*vars(Degrees()), *(name for name in vars(Options()) if name != "micro_batch_groups")]


def _in_words(layout: Mapping[str, bool | int | str]) -> str:

    def place(name: str) -> int:
        return _ORDER.index(name) if name in _ORDER else len(_ORDER)

    names = sorted(layout, key=lambda name: (place(name), name))
    return ", ".join(name if layout[name] is True else f"{name} {layout[name]}" for name in names)


def _head(svg: Svg, plan: Plan, number: int) -> float:
    layouts = "the layout" if number == 1 else f"the {number} best layouts"
    by = "" if plan.profile == "ours" else f", as {EXECUTORS[plan.profile]} would run them"
    svg.write(MARGIN, 34, f"{plan.num_workers:,} x {plan.device_type}: {layouts}{by}", 18, font_weight="bold")
    subtitle = (
        f"Predicted of a step of {plan.tokens_per_step:,} tokens: seconds of the slowest pipeline stage, "
    )
    svg.write(MARGIN, 55, f"{subtitle}memory of the fullest device.", 12, fill=PALE_INK)
    return 72


def _legend(svg: Svg, plan: Plan, rows: Sequence[LayoutRow], y: float) -> float:
    for title, colours, breakdowns in (
        ("step", _TIME, [row.time for row in rows]),
        ("memory", _BYTES, [row.memory for row in rows]),
    ):
        kinds_present = {
            kind for breakdown in breakdowns if breakdown for kind, amount in breakdown.items() if amount
        }
        kinds = [
            *(kind for kind in colours if kind in kinds_present),
            *sorted(kinds_present - colours.keys()),
        ]
        entries = [(colours.get(kind, _GREY), kind_of_time(kind)) for kind in kinds]
        if None in breakdowns:
            entries.append((RULE, "kinds not told"))
        svg.write(MARGIN, y + 11, title, fill=PALE_INK)
        begin = x = MARGIN + 58.0
        for colour, words in entries:
            if x + 17 + text_width(words, 11) > WIDTH - MARGIN:
                x, y = begin, y + LINE
            svg.add("rect", x=x, y=y, width=12, height=12, rx=2, fill=colour)
            x = svg.write(x + 17, y + 11, words) + 12
        if title == "memory":
            words = f"limit: {size_of(plan.memory.limit)} a device"
            if x + 17 + text_width(words, 11) > WIDTH - MARGIN:
                x, y = begin, y + LINE
            svg.add("line", x1=x + 6, y1=y - 1, x2=x + 6, y2=y + 13, stroke=_LIMIT, stroke_width=2)
            svg.write(x + 17, y + 11, words)
        y += LINE
    return y + 10


def _row(svg: Svg, row: LayoutRow, place: int, y: float, longest: float, max_bytes: int, limit: int) -> float:
    svg.add("line", x1=MARGIN, y1=y, x2=WIDTH - MARGIN, y2=y, stroke=RULE)
    top = y + 12
    at = _lines(svg, _wrap_lines(f"{place}. {row.layout}", 11.5), top + 11, 11.5, font_weight="bold")
    below = _lines(svg, _wrap_lines(row.beside, 10.5), at + 2, 10.5, fill=PALE_INK)
    time = {
        kind_of_time(kind): (_TIME.get(kind, _GREY), seconds) for kind, seconds in (row.time or {}).items()
    }
    memory = {kind: (_BYTES.get(kind, _GREY), num_bytes) for kind, num_bytes in (row.memory or {}).items()}
    _Bar("step", time, row.step_s, longest, seconds_of).draw(svg, top)
    top += _BAR + 10
    _Bar("memory", memory, row.memory_bytes, max_bytes, lambda num_bytes: size_of(int(num_bytes))).draw(
        svg, top
    )
    x = _BARS + _ROOM * limit / max_bytes
    svg.add("line", class_="limit", x1=x, y1=top - 4, x2=x, y2=top + _BAR + 4, stroke=_LIMIT, stroke_width=2)
    return max(top + _BAR, below - 12) + 14


def _wrap_lines(text: str, size: float) -> list[str]:
    """Wrap text without separating names from their values."""
    lines = wrap(
        re.sub(r"(\w) (?=\w+(,|$))", "\\1\N{NO-BREAK SPACE}", text), int(_NAMED / text_width("m", size))
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _lines(svg: Svg, lines: Sequence[str], y: float, size: float, **about: str) -> float:
    """Write lines, and return the y position below them."""
    for line in lines:
        svg.write(MARGIN, y, line, size, None, **about)
        y += 15
    return y


@dataclass(frozen=True)
class _Bar:
    """Stacked bar of amounts by kind, with their colours."""

    title: str
    kinds: Mapping[str, tuple[str, float]]
    total: float | None
    longest: float
    in_words: Callable[[float], str]

    def parts(self) -> Iterator[tuple[str, str, float]]:
        for kind, (colour, amount) in self.kinds.items():
            if amount:
                yield kind, colour, amount
        if not self.kinds and self.total:
            yield "all", RULE, self.total

    def draw(self, svg: Svg, y: float) -> None:
        svg.write(_BARS - 6, y + 14, self.title, 10.5, fill=PALE_INK, text_anchor="end")
        x = float(_BARS)
        for kind, colour, amount in self.parts():
            width = _ROOM * amount / self.longest
            words = self.in_words(amount)
            part = svg.add("rect", class_=f"part {self.title}", x=x, y=y, width=f"{width:.2f}", height=_BAR,
                           fill=colour, data_kind=kind, data_amount=f"{amount:.6g}")  # fmt: skip
            svg.add("title", part).text = f"{kind}: {words}"
            if text_width(words, 9.5) + 6 < width and self.kinds:
                ink = INK if _is_pale(colour) else PAPER
                svg.write(x + width / 2, y + 14, words, 9.5, fill=ink, text_anchor="middle")
            x += width
        label = "not told" if self.total is None else self.in_words(self.total)
        svg.write(WIDTH - MARGIN, y + 14, label, 11.5, font_weight="bold", text_anchor="end")


def _is_pale(colour: str) -> bool:
    """Whether dark text is readable on the colour, by sRGB luminance."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140
