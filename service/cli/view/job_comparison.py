"""Several jobs side by side: their results, and the fields in which their specs differ."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.text import Text

from service.cli.view.jobs import state
from service.cli.view.listing import Column
from service.cli.view.printable import printable
from service.cli.view.sweep import value_text
from service.wire.spec_difference import ABSENT, job_file_text, spec_differences

if TYPE_CHECKING:
    from service.client import Job

LAST_STEP = ("loss", "nll", "tokens_per_s")
"""Values of the last step that are shown."""
MIN_FIELD, MIN_VALUE = 16, 8


def results(job: "Job") -> dict[str, float]:
    """Last value of each metric of a job, and the numbers of its final report, by name."""
    last: Mapping[str, Any] = job.data.get("last_metric") or {}
    values: dict[str, Any] = {name: last.get(name) for name in LAST_STEP}
    evaluations = job.metrics("held_out", max_points=1)
    if evaluations:
        losses = [loss for loss in evaluations[-1]["held_out"].values() if loss is not None]
        values["held_out"] = fmean(losses) if losses else None
    report = (job.data.get("result") or {}).get("report")
    if isinstance(report, Mapping):
        values |= {f"report.{name}": value for name, value in report.items() if name != "num_steps"}
    return {name: value for name, value in values.items() if _is_number(value)}


def comparison_json(jobs: "Sequence[Job]", values: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The same as JSON; a field that a spec does not have is left out of its differences."""
    differences = spec_differences([job.data["spec"] for job in jobs])
    return {
        "jobs": [
            {"id": job.id, "name": job.name, "state": job.state, "step": job.step, "num_steps": job.num_steps,
             "values": dict(results)}
            for job, results in zip(jobs, values, strict=True)
        ],
        "differences": {
            path: {job.id: value for job, value in zip(jobs, row, strict=True) if value is not ABSENT}
            for path, row in differences.items()
        },
    }  # fmt: skip


def result_columns(jobs: "Sequence[Job]", values: Sequence[Mapping[str, float]]) -> list[Column]:
    """Columns of the results, a row a job; the last metrics are dropped first."""
    names = list(dict.fromkeys(name for results in values for name in results))
    return [
        Column("", [Text(str(number)) for number in range(1, len(jobs) + 1)], right=True),
        Column("JOB", [Text(job.id) for job in jobs]),
        Column("NAME", [Text(printable(job.name)) for job in jobs], can_shrink=2, min_width=8),
        Column("STATE", [state(job.state) for job in jobs], can_shrink=1),
        Column("STEP", [Text(f"{job.step:,}") for job in jobs], can_shrink=3, right=True),
        *(
            Column(printable(name).upper(), [Text(value_text(results.get(name))) for results in values],
                   can_shrink=4 + index, right=True)
            for index, name in enumerate(names)
        ),
    ]  # fmt: skip


def difference_columns(jobs: "Sequence[Job]") -> list[Column]:
    """Columns of the differences of specs, a row a field; no column if there are none. Jobs are named by their number
    in the results."""
    rows = spec_differences([job.data["spec"] for job in jobs])
    if not rows:
        return []
    return [
        Column("FIELD", [Text(printable(path)) for path in rows], can_shrink=1, min_width=MIN_FIELD),
        *(
            Column(str(index + 1), [Text(_value(values[index])) for values in rows.values()],
                   can_shrink=2 + index if index > 1 else 1, min_width=MIN_VALUE)
            for index in range(len(jobs))
        ),
    ]  # fmt: skip


def _value(value: Any) -> str:
    return "-" if value is ABSENT or value is None else printable(job_file_text(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
