"""Terminal view of a plan: mesh, parameters, memory, time, alternatives, reasons."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe.plan import Degrees, Plan, Trial
from moe.plan.money import MoneyEstimate, format_amount
from moe.plan.placement import Placement
from moe.plan.plan import RunnerUp
from moe.plan.profile import EXECUTORS
from moe.plan.quantities import format_seconds, time_kind_name
from moe.plan.search.explain import split_shape
from moe.plan.search.what_if import Cell
from moe.plan.verdict import verdict
from service.cli.view.amounts import num_bytes

BAR_CELLS = 24


def plan_view(plan: Plan, location: str) -> RenderableType:
    """Everything known of a plan."""
    if plan.module is not None:
        return Group(
            headline(plan, location),
            *section("computed by its module (predicted)", Text(plan.module.explained)),
            *(section("time of a step", _time(plan)) if plan.measured is not None else ()),
        )
    return Group(
        headline(plan, location),
        *section("verdict", _verdict(plan)),
        *section("parameters, and the fullest device's part", _parameters(plan)),
        *(section("placement of parameters", _placements(plan.placements, plan.degrees)) if plan.placements else ()),
        *section("memory of the fullest device (predicted)", _memory(plan)),
        *section("time of a step (predicted)", _time(plan)),
        *(section("trials before the run", _trials(plan.tried)) if plan.tried else ()),
        *section("why", lines(plan.reasons)),
        *(section("next best", _runners_up(plan.runners_up)) if plan.runners_up else ()),
        *(section("rejected", lines(plan.ruled_out)) if plan.ruled_out else ()),
    )


def _verdict(plan: Plan) -> Table:
    grid = labels()
    for question, answer in verdict(plan):
        grid.add_row(question, answer)
    return grid


def section(title: str, content: RenderableType, is_first: bool = False) -> tuple[RenderableType, ...]:
    """Title and content, with an empty line above unless first."""
    spacing = () if is_first else (Text(""),)
    return *spacing, Text(title, "bold"), content


def lines(sentences: Sequence[str]) -> Table:
    """Sentences as a list."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in sentences:
        grid.add_row("-", line)
    return grid


def headline(plan: Plan, location: str, label: str = "on") -> Table:
    """Cluster, workers and mesh of a plan; `label` labels `location`."""
    mesh = " x ".join(f"{axis} {degree:,}" for axis, degree in plan.mesh.items())
    grid = labels()
    grid.add_row(label, location)
    grid.add_row("workers", f"{plan.num_workers:,} on {plan.device_type}")
    grid.add_row("mesh", mesh)
    if plan.module is not None:
        grid.add_row("rows per step", f"{plan.tokens_per_step:,}")
        return grid
    groups, times = plan.options.micro_batch_groups, plan.options.num_micro_batches
    batch_text = f"{groups:,} group{'' if groups == 1 else 's'} at a time"
    grid.add_row("micro-batch", f"{batch_text}, {'once' if times == 1 else f'{times:,} times'} per step")
    grid.add_row("tokens per step", f"{plan.tokens_per_step:,}")
    if plan.profile != "ours":
        grid.add_row("run by", EXECUTORS[plan.profile])
    if plan.software is not None and plan.device != "cpu":
        grid.add_row("priced by", plan.software)
    if plan.not_yet:
        grid.add_row("runnable", Text(f"not yet: {', '.join(plan.not_yet)}", "yellow"))
    return grid


def _parameters(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("block", overflow="fold")
    for heading in ("layers", "parameters", "per device"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("placement", overflow="fold")
    for block in plan.blocks:
        table.add_row(
            block.block, str(block.count), _count(block.parameters), num_bytes(block.bytes_per_device), block.placement
        )
    return table


def _placements(placements: Sequence[Placement], degrees: Degrees) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("block and parameter", no_wrap=True)
    table.add_column("shape / split by", overflow="fold")
    last: tuple[str, ...] = ()
    for placement in sorted(placements, key=_place_of_block(placements)):
        if placement.blocks != last:
            table.add_row(Text(", ".join(placement.blocks), "dim"), "")
        table.add_row(f"  {placement.parameter}", split_shape(placement, degrees))
        last = placement.blocks
    return table


def _place_of_block(placements: Sequence[Placement]) -> Callable[[Placement], int]:
    """Sort key: order in which kinds of blocks first appear."""
    first = {kinds: index for index, kinds in enumerate(dict.fromkeys(placement.blocks for placement in placements))}
    return lambda placement: first[placement.blocks]


def _memory(plan: Plan) -> Table:
    grid, memory = labels(figures=True), plan.memory
    for kind, amount in memory.by_kind().items():
        if kind != "allowance":
            bar = Text("█" * round(BAR_CELLS * min(1.0, amount / memory.limit)), "cyan")
            grid.add_row(kind, num_bytes(amount), bar)
    share = memory.job_bytes / memory.limit
    grid.add_row("total", num_bytes(memory.job_bytes), f"{share:.0%} of {num_bytes(memory.limit)}")
    grid.add_row("free", num_bytes(max(0, memory.margin)), "framework and allocator fragmentation")
    return grid


def _time(plan: Plan) -> Table:
    time = plan.predicted
    grid = labels(figures=True)
    for name, seconds in time.by_kind().items():
        if seconds:
            bar = Text("█" * round(BAR_CELLS * seconds / time.step_s), "cyan")
            grid.add_row(time_kind_name(name), format_seconds(seconds), bar)
    unit = "tokens" if plan.module is None else "rows"
    rate = f"{plan.tokens_per_s:,.0f} {unit}/s"
    if plan.flops_per_step and plan.device != "cpu":
        rate += f", {plan.flops_per_s_per_device / 1e12:,.0f} TFLOP/s per device"
    if (utilization := plan.utilization) is not None:
        rate += f", MFU {utilization:.0%}"
    grid.add_row("total", format_seconds(time.step_s), rate)
    if (measurement := plan.measured) is not None:
        words = f"{measurement.tokens_per_s:,.0f} {unit}/s, median of {measurement.num_steps} steps"
        grid.add_row("measured", format_seconds(measurement.step_s), Text(words, "bold"))
    if time.hidden_s:
        grid.add_row("hidden", format_seconds(time.hidden_s), "of collectives, hidden by computation")
    for label, words in run_of(plan):
        figure, _, rest = words.partition(": ")
        grid.add_row(label, figure, rest)
    return grid


def run_of(plan: Plan) -> Iterator[tuple[str, str]]:
    """(label, `amount: explanation`) of the whole run's time and, if known, price."""
    unit = "tokens" if plan.module is None else "rows"
    if plan.num_steps and plan.num_steps > 1:
        tokens = plan.num_steps * plan.tokens_per_step
        steps = f"{plan.num_steps:,} steps, {_count(tokens)} {unit}"
        yield "the run", f"{_long(plan.num_steps * plan.predicted.step_s)}: {steps}"
    if plan.money is not None:
        yield "money", f"{format_amount(plan.money.per_hour)}: per hour{_money(plan.money, unit)}"


def _money(money: MoneyEstimate, unit: str) -> str:
    run = "" if money.run is None else f", {format_amount(money.run)} for the run"
    return f", {format_amount(money.per_million_tokens)} per million {unit}{run}"


def _trials(trials: Sequence[Trial]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for trial in trials:
        layout = ", ".join(f"{name} {value}" for name, value in trial.layout.items())
        prediction = format_seconds(trial.predicted_step_s)
        figures = f"{format_seconds(trial.measured_step_s)} per step measured, {prediction} predicted"
        grid.add_row("-", Text.assemble(layout, ": ", (figures, "bold")))
    return grid


def _runners_up(runners_up: Sequence[RunnerUp]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for number, runner_up in enumerate(runners_up, start=2):
        layout = ", ".join(f"{name} {value}" for name, value in runner_up.layout.items())
        figures = []
        if runner_up.step_s is not None:
            figures.append(format_seconds(runner_up.step_s))
        if runner_up.memory is not None:
            figures.append(num_bytes(runner_up.memory.job_bytes))
        grid.add_row(f"{number}.", Text.assemble(layout, "\n", (f"{', '.join(figures)}: {runner_up.why_not}", "dim")))
    return grid


def what_if_view(cells: Sequence[Cell]) -> Table:
    """Table with a row for each cell of a what-if grid."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for axis in cells[0].values:
        table.add_column(axis, justify="right", no_wrap=True)
    plans = [cell.plan for cell in cells if cell.plan is not None]
    in_pools, has_money = any(plan.pool for plan in plans), any(plan.money for plan in plans)
    headings = (*["pool"] * in_pools, "step", "tokens/s", *["money/M tokens"] * has_money, "memory")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for cell in cells:
        if (plan := cell.plan) is None:
            table.add_row(*cell.values.values(), *["-"] * len(headings), Text(cell.why_not, "yellow"))
            continue
        mesh = " x ".join(f"{axis} {degree:,}" for axis, degree in plan.mesh.items())
        money = "-" if plan.money is None else format_amount(plan.money.per_million_tokens)
        table.add_row(
            *cell.values.values(), *[plan.pool or "-"] * in_pools, format_seconds(plan.predicted.step_s),
            f"{plan.tokens_per_s:,.0f}", *[money] * has_money, f"{plan.memory.job_bytes / plan.memory.limit:.0%}", mesh,
        )  # fmt: skip
    return table


def labels(figures: bool = False) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=15)
    grid.add_column(justify="right" if figures else "left", no_wrap=figures)
    if figures:
        grid.add_column()
    return grid


def _long(seconds: float) -> str:
    """`12 min`, `3.5 h`, `124 days`."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            number = seconds / length
            return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:,.3g} {unit}"
    return f"{seconds:,.3g} s"


def _count(number: int) -> str:
    """`671 B`, `1.2 M`: three digits."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
