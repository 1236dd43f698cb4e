"""Sensitivity of a plan: a row for each change of the machine."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from moe.plan import Plan
from moe.plan.quantities import format_seconds
from moe.plan.search.sensitivity import SensitivityOutcome


def sensitivity_view(plan: Plan, changes: Sequence[SensitivityOutcome]) -> Table:
    """The plan's step time under each change, and the fastest layout."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("with", no_wrap=True)
    for heading in ("this layout", "the fastest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    table.add_row("no change", _with_change(plan.predicted.step_s, plan), "", "")
    for change in changes:
        current = Text("does not fit", "yellow") if change.step_s is None else _with_change(change.step_s, plan)
        if change.best is None:
            table.add_row(change.description, current, Text("none", "yellow"), Text(change.why_not, "yellow"))
        elif change.best.candidate == plan.candidate:
            table.add_row(change.description, current, "the same", "")
        else:
            fastest = format_seconds(change.best.predicted.step_s)
            table.add_row(change.description, current, fastest, str(change.best.candidate))
    return table


def _with_change(step_s: float, plan: Plan) -> Text:
    excess = step_s / plan.predicted.step_s - 1
    return Text.assemble(format_seconds(step_s), (f" {excess:+.0%}" if abs(excess) >= 0.005 else "", "dim"))
