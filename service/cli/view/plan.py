"""A plan on the screen: the mesh, predicted memory and time, and the reasons."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe.plan import Plan
from moe.plan.explain import kind_of_time
from service.cli.view.amounts import num_bytes

BAR_CELLS = 24


def plan_view(plan: Plan, where: str) -> RenderableType:
    """All that a person needs to accept or override a plan."""
    return Group(
        _headline(plan, where),
        Text(""),
        Text("memory of the fullest device (predicted)", "bold"),
        _memory(plan),
        Text(""),
        Text("time of a step (predicted)", "bold"),
        _time(plan),
        Text(""),
        Text("why", "bold"),
        *(Text(f"- {reason}") for reason in plan.reasons),
        *_runners_up(plan),
    )


def _headline(plan: Plan, where: str) -> Table:
    mesh = " x ".join(f"{axis} {degree:,}" for axis, degree in plan.mesh.items())
    grid = _grid()
    grid.add_row("on", where)
    grid.add_row("workers", f"{plan.num_workers:,} on {plan.device_type}")
    grid.add_row("mesh", mesh)
    groups, times = plan.micro_batch_groups, plan.num_micro_batches
    at_a_time = f"{groups:,} group{'' if groups == 1 else 's'} at a time"
    grid.add_row("micro-batch", f"{at_a_time}, {'once' if times == 1 else f'{times:,} times'} a step")
    grid.add_row("tokens a step", f"{plan.tokens_per_step:,}")
    return grid


def _memory(plan: Plan) -> Table:
    grid = _grid(figures=True)
    for kind, amount in plan.memory.by_kind().items():
        share = amount / plan.memory.limit
        grid.add_row(kind, num_bytes(amount), Text("█" * round(BAR_CELLS * min(1.0, share)), "cyan"))
    share = plan.memory.total / plan.memory.limit
    grid.add_row("total", num_bytes(plan.memory.total), f"{share:.0%} of {num_bytes(plan.memory.limit)}")
    return grid


def _time(plan: Plan) -> Table:
    time = plan.predicted
    kinds = {kind_of_time(name): seconds for name, seconds in time.by_kind().items() if seconds}
    grid = _grid(figures=True)
    for kind, seconds in kinds.items():
        grid.add_row(kind, _seconds(seconds), Text("█" * round(BAR_CELLS * seconds / time.step_s), "cyan"))
    grid.add_row("total", _seconds(time.step_s), f"{plan.tokens_per_step / time.step_s:,.0f} tokens/s")
    return grid


def _runners_up(plan: Plan) -> list[Text]:
    if not plan.runners_up:
        return []
    rows = [
        Text(f"- expert {other.expert} x data {other.data}: {other.why_not}") for other in plan.runners_up
    ]
    return [Text(""), Text("considered and not chosen", "bold"), *rows]


def _grid(figures: bool = False) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=14)
    grid.add_column(justify="right" if figures else "left", no_wrap=figures)
    if figures:
        grid.add_column(no_wrap=True)
    return grid


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
