"""Picture of a job's best layouts: step time and memory by kind, as SVG. Equal plans give equal bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from moe.plan.candidate import Options
from moe.plan.degrees import Degrees
from moe.plan.plan import MemoryEstimate, Plan
from moe.plan.profile import EXECUTORS
from moe.plan.quantities import format_bytes, format_seconds, time_kind_name
from moe.plan.search.explain import layout_of
from moe.plan.svg import require_matplotlib, svg_of
from moe.spec import spec_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIME_COLOURS = {
    "products_s": "#1a56a8", "attention_s": "#4a86cf", "routing_s": "#7fb0e6", "elementwise_s": "#a9cbf0",
    "launches_s": "#d3e3f7", "all_to_all_s": "#a84a06", "gather_s": "#d87624", "send_s": "#eda25f",
    "all_reduce_s": "#f3c296", "bubble_s": "#8c959f", "data_s": "#b8bfc7", "optimizer_s": "#43a56d",
}  # fmt: skip
"""Computation blue, communication ochre, waiting grey."""
MEMORY_COLOURS = {
    "parameters": "#5b4a9c", "gradients": "#8474c4", "optimizer": "#ada1de", "activations": "#c9a227",
    "workspace": "#dcc06a", "logits": "#ecdcaa", "dispatch": "#2f8f8b", "communication": "#8fb8b5",
    "staging": "#c3d9d7",
}  # fmt: skip
"""State violet, activations yellow, communication teal."""
_GREY, _LIMIT = "#d1d9e0", "#b3261e"
_TOTAL = "kinds not recorded"
_LABEL_LETTERS = 38


@dataclass(frozen=True)
class LayoutRow:
    """One layout. `time` and `memory` are None if an old plan has only totals."""

    layout: str
    status: str
    step_s: float | None
    memory_bytes: int | None
    time: Mapping[str, float] | None
    memory: Mapping[str, int] | None
    limit: int

    @property
    def label(self) -> str:
        """Layout and status on several lines."""
        return f"{fill(self.layout, _LABEL_LETTERS)}\n{fill(self.status, _LABEL_LETTERS)}"


def draw_svg(plan: Plan) -> str:
    """SVG text of `figure_of`."""
    return svg_of(figure_of(plan))


def figure_of(plan: Plan) -> "Figure":
    """Figure with a row per layout, the chosen one first: a bar of time and one of memory.

    Raises SpecError for a module's plan, which has a single layout, and if matplotlib is not installed.
    """
    if plan.module is not None:
        raise spec_error("not_applicable", "module", None, "has no layouts to draw", "draw it with --module")
    require_matplotlib("draw")
    from matplotlib.figure import Figure

    rows = rows_of(plan)
    num_lines = sum(max(3, row.label.count("\n") + 2) for row in rows)
    figure = Figure(figsize=(12, 2.4 + 0.17 * num_lines), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    figure.suptitle(_title(plan, len(rows)))
    time.set_title(f"seconds of a step of {plan.tokens_per_step:,} tokens (slowest pipeline stage)", fontsize=9)
    memory.set_title("memory of the fullest device", fontsize=9)
    _draw_bars(time, TIME_COLOURS, [(row.time, row.step_s) for row in rows], format_seconds)
    _draw_bars(
        memory,
        MEMORY_COLOURS,
        [(row.memory, row.memory_bytes) for row in rows],
        lambda num_bytes: format_bytes(int(num_bytes)),
    )
    memory.vlines(
        [row.limit for row in rows],
        [index - 0.42 for index in range(len(rows))],
        [index + 0.42 for index in range(len(rows))],
        colors=_LIMIT,
        label=f"limit: {format_bytes(plan.memory.limit)}",
    )
    time.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    time.invert_yaxis()
    for axes in (time, memory):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, fontsize=8, frameon=False)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
    return figure


def _title(plan: Plan, num_layouts: int) -> str:
    layouts = "the layout" if num_layouts == 1 else f"the {num_layouts} best layouts"
    executor = "" if plan.profile == "ours" else f", as {EXECUTORS[plan.profile]} would run them"
    return f"{plan.num_workers:,} x {plan.device_type}: {layouts}{executor}"


def _draw_bars(
    axes: "Axes",
    colours: Mapping[str, str],
    amounts: Sequence[tuple[Mapping[str, float] | None, float | None]],
    format_amount: Callable[[float], str],
) -> None:
    """Draw a stacked bar per row, with its total behind it. `amounts` are (amounts by kind, total)."""
    ends = [0.0] * len(amounts)
    kinds = dict.fromkeys([*colours, *(kind for by_kind, _ in amounts for kind in by_kind or {})])
    for kind in kinds:
        widths = [(by_kind or {}).get(kind, 0) for by_kind, _ in amounts]
        if any(widths):
            axes.barh(
                range(len(widths)),
                widths,
                left=ends,
                height=0.6,
                color=colours.get(kind, _GREY),
                label=time_kind_name(kind),
            )
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    unknown = [(total or 0.0) if by_kind is None else 0.0 for by_kind, total in amounts]
    if any(by_kind is None for by_kind, _ in amounts):
        axes.barh(range(len(unknown)), unknown, height=0.6, color=_GREY, label=_TOTAL)
    for index, (end, (_, total)) in enumerate(zip(ends, amounts, strict=True)):
        text = "not recorded" if total is None else format_amount(total)
        axes.annotate(
            text,
            (max(end, unknown[index]), index),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )


def rows_of(plan: Plan) -> list[LayoutRow]:
    """Return the rows of the picture, the chosen layout first."""
    status = f"chosen, but cannot be run yet: {', '.join(plan.not_yet)}" if plan.not_yet else "chosen"
    rows = [
        LayoutRow(_describe_layout(layout_of(plan)), status, plan.predicted.step_s, plan.memory.job_bytes,
            plan.predicted.by_kind(), _job_memory(plan.memory), plan.memory.limit)
    ]  # fmt: skip
    for runner_up in plan.runners_up:
        time, memory = runner_up.predicted, runner_up.memory
        rows.append(
            LayoutRow(_describe_layout(runner_up.layout), runner_up.why_not, runner_up.step_s,
                runner_up.memory_bytes if memory is None else memory.job_bytes,
                None if time is None else time.by_kind(), None if memory is None else _job_memory(memory),
                plan.memory.limit if memory is None else memory.limit)
        )  # fmt: skip
    return rows


def _job_memory(memory: MemoryEstimate) -> dict[str, int]:
    """Bytes by kind, without the allowance."""
    return {kind: amount for kind, amount in memory.by_kind().items() if kind != "allowance"}


_ORDER = [*vars(Degrees()), *(name for name in vars(Options()) if name != "micro_batch_groups")]


def _describe_layout(layout: Mapping[str, bool | int | str]) -> str:

    def place(name: str) -> int:
        return _ORDER.index(name) if name in _ORDER else len(_ORDER)

    names = sorted(layout, key=lambda name: (place(name), name))
    return ", ".join(name if layout[name] is True else f"{name}\N{NO-BREAK SPACE}{layout[name]}" for name in names)
