"""Listings of sweeps and of a sweep's members."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from service.cli.view.amounts import moment
from service.cli.view.jobs import MIN_REASON, state
from service.cli.view.listing import Column
from service.cli.view.printable import printable
from service.wire.spec_difference import job_file_text

MIN_VALUE = 6


def sweep_columns(sweeps: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns of `sweep` without a file."""
    return [
        Column("SWEEP", [Text(sweep["id"]) for sweep in sweeps]),
        Column("NAME", [Text(printable(sweep["name"])) for sweep in sweeps], can_shrink=3, min_width=8),
        Column("METHOD", [Text(sweep["method"]) for sweep in sweeps], can_shrink=4),
        Column("STATE", [state(sweep["state"]) for sweep in sweeps], can_shrink=1),
        Column("JOBS", [Text(f"{sweep['num_members']:,}") for sweep in sweeps], can_shrink=2, right=True),
        Column("SUBMITTED", [Text(moment(sweep["created_at"])) for sweep in sweeps], can_shrink=6),
        Column("REASON", [Text(printable(sweep["reason"]), "dim") for sweep in sweeps], can_shrink=5,
               min_width=MIN_REASON),
    ]  # fmt: skip


def member_columns(sweep: dict[str, Any]) -> list[Column]:
    """Columns of a sweep's table, the best member first: what it is compared by, and its values."""
    members = sweep["members"]
    rungs = [Text(f"{member['rung']}/{len(sweep['rungs'])}") for member in members]
    return [
        Column("JOB", [Text(member["job"]) for member in members]),
        Column("STATE", [state("held" if member["is_held"] else member["state"]) for member in members], can_shrink=3),
        Column("STEP", [Text(_step(member)) for member in members], can_shrink=2, right=True),
        *([Column("RUNG", rungs, can_shrink=4, right=True)] if sweep["rungs"] else []),
        Column(sweep["metric"].upper(), [Text(value_text(member["value"])) for member in members], right=True),
        *(
            Column(printable(label), [Text(printable(job_file_text(member["values"][path]))) for member in members],
                   can_shrink=5 + index, min_width=MIN_VALUE, right=True)
            for index, (path, label) in enumerate(field_labels(sweep["fields"]).items())
        ),
    ]  # fmt: skip


def field_labels(paths: Sequence[str]) -> dict[str, str]:
    """Shortest end of each path that no other path ends in."""
    labels = {}
    for path in paths:
        parts = path.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        rivals = [rival for rival in paths if rival != path]
        labels[path] = next(end for end in ends if not any(f".{rival}".endswith(f".{end}") for rival in rivals))
    return labels


def value_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _step(member: dict[str, Any]) -> str:
    return "-" if member["step"] is None else f"{member['step']:,}/{member['num_steps']:,}"
