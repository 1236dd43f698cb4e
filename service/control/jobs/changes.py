"""State changes of jobs: only allowed transitions from the state that a decision was based on, recorded as events."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import Connection

from moe.plan import Plan
from service.control.report.event_text import WireEvent, data_text, to_wire
from service.control.report.failure_history import END, read_failures
from service.control.report.outbox import enqueue_state
from service.control.report.plans import change_of
from service.control.store.clock import now_us
from service.control.store.events import NewEvent, append_events
from service.control.store.jobs import JobRow, change_job, get_job
from service.wire.states import ENDED, TRANSITIONS, State

_NO_ATTEMPT: dict[str, Any] = {
    "launch": None,
    "gang": None,
    "unreachable_since": None,
    "unseen_since": None,
    "unconfirmed_since": None,
    "stopped_at": None,
    "retry_at": None,
    "group_phase": None,
    "group_phase_at": None,
    "group_reason": None,
}
"""Columns of a job with nothing on the cluster."""


def set_state(
    tx: Connection,
    job: JobRow,
    new_state: State,
    reason: str,
    actor: str,
    values: Mapping[str, Any] | None = None,
    *,
    notifies: bool = True,
) -> list[WireEvent]:
    """Change a job's state, if its state, attempt and request are still those of `job`. Returns events to publish
    after the commit. `notifies`: whether to enqueue it for webhooks."""
    previous = State(job.state)
    assert new_state in TRANSITIONS[previous], f"{previous} -> {new_state}"
    time_us = now_us()
    columns: dict[str, Any] = {"state": new_state, "reason": reason, "updated_at": time_us, **(values or {})}
    if new_state in ENDED:
        columns["finished_at"] = time_us
    if new_state in ENDED or new_state in (State.PAUSED, State.QUEUED):
        columns |= _NO_ATTEMPT | {"request": None, "requested_at": None}
    if new_state == State.QUEUED:  # resumed: clear the outcome of its earlier end
        columns |= {"finished_at": None, "result": None}
    if new_state == State.RUNNING and job.started_at is None:
        columns["started_at"] = time_us
    if not change_job(tx, job.number, {previous}, columns, attempt=job.attempt, request=job.request):
        return []
    return _record_state(
        tx, job, previous, new_state, reason, actor, columns.get("attempt", job.attempt), result=columns.get("result"),
        notifies=notifies,
    )  # fmt: skip


def schedule_attempt(
    tx: Connection,
    job: JobRow,
    reason: str,
    actor: str,
    retry_at: int,
    *,
    counts_as: Literal["failure", "setback", "lost_start"] | None,
    kind: str = "",
) -> list[WireEvent]:
    """Record the end of an attempt, and schedule the next. `counts_as`: kind of loss that the end is, if any; `kind`:
    kind of a failure."""
    previous = State(job.state)
    columns = _NO_ATTEMPT | {"state": State.RECOVERING, "reason": reason, "updated_at": now_us(), "retry_at": retry_at}
    if counts_as is not None:
        stored_job = get_job(tx, job.id, lock=True) or job  # may have more reported losses
        losses = read_failures(stored_job.losses, stored_job.failures)
        if counts_as == "failure":
            losses = losses.after_failure((job.attempt, END), kind)
        elif counts_as == "setback":
            losses = losses.after_setback(job.attempt)
        else:
            losses = losses.after_lost_start(job.attempt)
        columns |= {"losses": losses.model_dump_json(), "failures": losses.num_failures}
    if job.request == "resize":  # done or not
        columns |= {"request": None, "requested_at": None}
    if not change_job(tx, job.number, {previous}, columns, attempt=job.attempt, request=job.request):
        return []
    return _record_state(tx, job, previous, State.RECOVERING, reason, actor, attempt=job.attempt)


def explain(
    tx: Connection, job: JobRow, reason: str, actor: str, values: Mapping[str, Any] | None = None
) -> list[WireEvent]:
    """Change the reason of a job's state."""
    if reason == job.reason and not values:
        return []
    columns = {"reason": reason, "updated_at": now_us(), **(values or {})}
    if not change_job(tx, job.number, {job.state}, columns, attempt=job.attempt) or reason == job.reason:
        return []
    return _record_state(tx, job, job.state, State(job.state), reason, actor, attempt=job.attempt)


def record_plan(
    tx: Connection, job: JobRow, plan: Plan, before: Plan | None, attempt: int, actor: str
) -> list[WireEvent]:
    """Store the event of an attempt's plan; `before`: the previous plan."""
    event = NewEvent("plan", now_us(), attempt, actor, data_text(change_of(plan, before)))
    return [to_wire(row) for row in append_events(tx, job.number, [event])]


def record_new_job(tx: Connection, job: JobRow, actor: str, *, notifies: bool = True) -> list[WireEvent]:
    """Store the first event of a new job."""
    return _record_state(tx, job, None, State(job.state), job.reason, actor, attempt=0, notifies=notifies)


def warn(tx: Connection, job: JobRow, warnings: Sequence[str], actor: str) -> list[WireEvent]:
    """Store warnings about a job for its log and stream."""
    events = [
        NewEvent("log", now_us(), None, actor, data_text({"level": "warning", "message": warning}))
        for warning in warnings
    ]
    return [to_wire(row) for row in append_events(tx, job.number, events)] if events else []


def _record_state(
    tx: Connection,
    job: JobRow,
    previous: str | None,
    state: State,
    reason: str,
    actor: str,
    attempt: int,
    result: str | None = None,
    notifies: bool = True,
) -> list[WireEvent]:
    """Store the event; enqueue a change of state for webhooks too, but not a new reason for the same state."""
    data = {"state": state, "previous": previous, "reason": reason}
    new_event = NewEvent("state", now_us(), attempt or None, actor, data_text(data))
    (event,) = append_events(tx, job.number, [new_event])
    if notifies and state != previous:
        enqueue_state(tx, job, event, result)
    return [to_wire(event)]
