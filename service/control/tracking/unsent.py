"""Events of a job that a tracker does not have yet, without those of steps that were repeated since."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from moe.records import StepRecord
from moe.spec import JobSpec
from moe.train.best_score import BestScore
from service.control.store.events import events_by_id, first_by_step, redone_steps
from service.control.store.jobs import JobRow, get_by_number
from service.control.store.tracked_runs import MetricRow, metrics_after, newest_event
from service.tracker.messages import RunEnd, StepItem
from service.tracker.values import scores_of
from service.wire.states import ENDED, State

PAGE_EVENTS = 250
MAX_EVALUATIONS = 10_000


@dataclass(frozen=True)
class UnsentPage:
    """Events after a position in the job's sequence, up to `through`."""

    through: int
    steps: tuple[StepItem, ...]
    state: State
    end: RunEnd | None
    """End of the job, on its last page; None before."""


def read_unsent(tx: Connection, job_number: int, spec: JobSpec, after: int, committed_only: bool) -> UnsentPage | None:
    """Read the next page; None if there are no events. `committed_only`: only up to the newest checkpoint, unless the
    job holds no workers."""
    job = get_by_number(tx, job_number)
    if job is None or job.last_event_id <= after:
        return None
    state, head = State(job.state), job.last_event_id
    if committed_only and state not in ENDED and state != State.PAUSED:
        head = newest_event(tx, job_number, "checkpoint")
    if head <= after:
        return None
    rows = metrics_after(tx, job_number, after, head, PAGE_EVENTS)
    through = rows[-1].id if len(rows) == PAGE_EVENTS else head
    is_end = state in ENDED and through == job.last_event_id and newest_event(tx, job_number, "state") > after
    end = _end(tx, job, spec) if is_end else None
    return UnsentPage(through, _steps(tx, job, rows), state, end)


def _steps(tx: Connection, job: JobRow, rows: Sequence[MetricRow]) -> tuple[StepItem, ...]:
    redone = {
        (attempt, group, step)
        for attempt, group in {(row.attempt, row.group) for row in rows}
        for step in redone_steps(tx, job.number, "metric", _steps_of(rows, attempt, group), attempt, group)
    }
    # Steps ahead of the job are of a dead group, and will be repeated. But the new group may continue from steps of the
    # group that it has just replaced.
    has_ended = job.state in ENDED
    return tuple(
        StepItem(
            step=row.step, attempt=row.attempt, group=row.group, time_s=row.time / 1e6,
            late=row.superseded is not None, data=row.data,
        )
        for row in rows
        if (row.attempt, row.group, row.step) not in redone
        and row.superseded != "step"
        and (row.step <= job.step or (row.superseded is not None and not has_ended))
    )  # fmt: skip


def _steps_of(rows: Sequence[MetricRow], attempt: int, group: int) -> set[int]:
    return {row.step for row in rows if (row.attempt, row.group) == (attempt, group)}


def _end(tx: Connection, job: JobRow, spec: JobSpec) -> RunEnd:
    result = json.loads(job.result) if job.result else {}
    report = result.get("report")
    scores = scores_of(report) if isinstance(report, dict) else {}
    best = _best_score(tx, job, spec)
    if best is not None and best.value is not None and best.step is not None:
        scores |= {f"best/{best.criterion.metric}": best.value, "best/step": float(best.step)}
    finished_at = job.finished_at or job.updated_at
    outcome = {State.SUCCEEDED: "succeeded", State.FAILED: "failed"}.get(State(job.state), "cancelled")
    return RunEnd.model_validate(
        {"outcome": outcome, "reason": job.reason, "step": job.step, "time_s": finished_at / 1e6, "scores": scores}
    )


def _best_score(tx: Connection, job: JobRow, spec: JobSpec) -> BestScore | None:
    """Best of the periodic evaluations; None without any."""
    if spec.train.evaluation.every_steps is None:
        return None
    best = BestScore.of_job(spec)
    ids = first_by_step(tx, job.number, "metric", 0, MAX_EVALUATIONS, name="held_out")
    for row in events_by_id(tx, job.number, ids):
        record = StepRecord.read(json.loads(row.data))
        if record.held_out is not None and record.step <= job.step:
            best = best.after(record.step, record.held_out)
    return best
