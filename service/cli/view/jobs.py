"""Listings of jobs and checkpoints, and log lines."""

from typing import TYPE_CHECKING, Any

from rich.text import Text

from service.cli.view.amounts import moment, num_bytes
from service.cli.view.listing import Column
from service.cli.view.printable import printable

if TYPE_CHECKING:
    from moe.records import StoredCheckpoint
    from service.client import Job

MIN_NAME, MIN_REASON = 12, 16


def job_columns(jobs: "list[Job]") -> list[Column]:
    """Columns of `ls`. The submission time is dropped first; ids are never cut."""
    return [
        Column("JOB", [Text(job.id) for job in jobs]),
        Column("NAME", [Text(printable(job.name)) for job in jobs], can_shrink=3, min_width=MIN_NAME),
        Column("STATE", [state(job.state) for job in jobs], can_shrink=1),
        Column("STEP", [Text(f"{job.step:,}/{job.num_steps:,}") for job in jobs], can_shrink=2, right=True),
        Column("SUBMITTED", [Text(moment(job.data.get("created_at"))) for job in jobs], can_shrink=5),
        Column("REASON", [Text(printable(job.reason), "dim") for job in jobs], can_shrink=4, min_width=MIN_REASON),
    ]


def checkpoint_columns(checkpoints: "list[StoredCheckpoint]") -> list[Column]:
    """Columns of `checkpoints`. Paths are never cut."""
    sizes = [checkpoint.size_bytes for checkpoint in checkpoints]
    any_best = any(checkpoint.best for checkpoint in checkpoints)
    return [
        Column("STEP", [Text(f"{checkpoint.step:,}") for checkpoint in checkpoints], right=True),
        Column("COMMITTED", [Text(moment(checkpoint.created_at)) for checkpoint in checkpoints]),
        Column("SIZE", [Text("-" if size is None else num_bytes(size)) for size in sizes], right=True),
        *(
            [Column("BEST", [Text("best" if checkpoint.best else "") for checkpoint in checkpoints])]
            if any_best
            else []
        ),
        Column("WHERE", [Text(printable(checkpoint.fault or checkpoint.path)) for checkpoint in checkpoints]),
    ]


def log_line(line: dict[str, Any]) -> Text:
    """Log line prefixed with its writer, as `a1.g0.rank-0 | ...`."""
    writer = f"a{line['attempt']}.{line['worker']}"
    return Text.assemble((f"{writer} | ", "dim"), printable(str(line["message"])))


STATE_STYLES = {
    "queued": "cyan", "starting": "cyan", "running": "green", "succeeded": "bold green", "failed": "bold red",
    "cancelled": "bold yellow", "recovering": "bold yellow", "pausing": "yellow", "paused": "bold yellow",
    "deleting": "dim",
}  # fmt: skip


def state(name: str) -> Text:
    return Text(name, STATE_STYLES.get(name, ""))
