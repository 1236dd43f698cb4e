"""Short view of a plan: the verdict and the best layouts."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe.plan import Plan
from moe.plan.quantities import format_seconds, time_kind_name
from moe.plan.search.explain import IGNORED, IGNORED_BEFORE, layout_of
from moe.plan.speed import describe_speed
from moe.plan.verdict import verdict
from service.cli.view.amounts import num_bytes
from service.cli.view.plan import labels, run_of, section

_LARGEST = 4


def short_plan_view(plan: Plan, location: str) -> RenderableType:
    """Whether the job fits and can run, its speed, and the runners-up."""
    return Group(
        _verdict(plan, location),
        *section("layouts (predicted)", _layouts(plan)),
        Text(""),
        _where_it_goes(plan),
        Text(""),
        Text("--full shows reasons, placements, memory and time by kind", "dim"),
    )


def _verdict(plan: Plan, location: str) -> Table:
    grid = labels()
    workers = f"{plan.num_workers:,} worker{'' if plan.num_workers == 1 else 's'}"
    grid.add_row("for", f"{workers} on {location}")
    for question, answer in verdict(plan):
        style = "yellow" if answer.startswith(("no", "not yet")) else ""
        grid.add_row(question, Text(answer, style))
    return grid


def _layouts(plan: Plan) -> Table:
    grid, step_s = Table.grid(padding=(0, 1, 0, 0)), plan.predicted.step_s
    figures = [format_seconds(step_s), num_bytes(plan.memory.job_bytes), *_not_yet(plan.not_yet)]
    _add(grid, _in_words(layout_of(plan)), figures)
    for runner_up in plan.runners_up:
        figures = [] if runner_up.step_s is None else [format_seconds(runner_up.step_s)]
        figures += [] if runner_up.memory is None else [num_bytes(runner_up.memory.job_bytes)]
        figures += [] if runner_up.step_s is None else [describe_speed(runner_up.step_s, step_s)]
        _add(grid, _in_words(runner_up.layout), [*figures, *_not_yet(runner_up.not_yet)])
    return grid


def _add(grid: Table, layout: str, figures: list[str]) -> None:
    grid.add_row(f"{len(grid.rows) + 1}.", Text.assemble(layout, "\n", (", ".join(figures), "dim")))


def _not_yet(not_yet: tuple[str, ...]) -> list[str]:
    return [f"not runnable yet: {', '.join(not_yet)}"] if not_yet else []


def _in_words(layout: dict[str, bool | int | str]) -> str:
    return ", ".join(name if value is True else f"{name} {value}" for name, value in layout.items())


def _where_it_goes(plan: Plan) -> Table:
    grid, step_s = labels(), plan.predicted.step_s
    time = {time_kind_name(kind): seconds / step_s for kind, seconds in plan.predicted.by_kind().items()}
    grid.add_row("time", _largest({kind: f"{share:.0%}" for kind, share in time.items()}, time))
    memory = {kind: amount for kind, amount in plan.memory.by_kind().items() if kind != "allowance"}
    grid.add_row("memory", _largest({kind: num_bytes(amount) for kind, amount in memory.items()}, memory))
    if (measurement := plan.measured) is not None:
        speed = f"{format_seconds(measurement.step_s)} per step, {measurement.tokens_per_s:,.0f} tokens/s"
        grid.add_row("measured", Text(f"{speed}, median of {measurement.num_steps} steps", "bold"))
    for label, figures in run_of(plan):
        grid.add_row(label, figures.replace(": per hour", " per hour"))
    if plan.software is not None and plan.device != "cpu":
        grid.add_row("priced by", plan.software)
    for reason in plan.reasons:
        if reason.startswith((IGNORED, IGNORED_BEFORE)):
            grid.add_row("ignored", reason.partition(": ")[2])
    return grid


def _largest(figures: dict[str, str], amounts: dict[str, float] | dict[str, int]) -> str:
    order = sorted((kind for kind in amounts if amounts[kind]), key=lambda kind: -amounts[kind])
    return ", ".join(f"{kind} {figures[kind]}" for kind in order[:_LARGEST])
