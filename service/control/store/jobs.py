"""Jobs as rows, changed only from the state in which the change was decided."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, Select, and_, delete, func, insert, or_, select, update

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class JobReference:
    """Columns of a job that an open stream needs."""

    id: str
    number: int
    storage: str
    first_event_id: int


@dataclass(frozen=True)
class JobSummary:
    """Columns of a job in a list."""

    number: int
    id: str
    owner: str
    name: str
    labels: str
    storage: str
    state: str
    reason: str
    created_at: int
    updated_at: int
    queued_at: int
    started_at: int | None
    finished_at: int | None
    step: int
    num_steps: int
    loss: float | None
    last_event_id: int
    first_event_id: int
    thinned_to: int
    request: str | None
    attempt: int
    dashboard_url: str | None


@dataclass(frozen=True)
class JobRow(JobSummary):
    """All columns of a job."""

    version: int
    spec: str
    plan: str | None
    last_metric: str | None
    saves: str | None
    result: str | None
    requested_at: int | None
    failures: int
    losses: str | None
    launch: str | None
    token_hash: str | None
    gang: str | None
    unreachable_since: int | None
    unseen_since: int | None
    unconfirmed_since: int | None
    stopped_at: int | None
    retry_at: int | None
    group_phase: str | None
    group_phase_at: int | None
    group_reason: str | None
    held: int
    pause_at: int | None
    unfit_for: str | None


SUMMARIES = select(*(tables.jobs.c[field.name] for field in fields(JobSummary)))
_JOBS = select(*(tables.jobs.c[field.name] for field in fields(JobRow)))
"""Columns in the order of the fields; each query adds its conditions."""


def insert_job(tx: Connection, values: Mapping[str, Any], labels: Mapping[str, str]) -> JobRow:
    """Store a new job and return its row."""
    row = {
        "version": ROW_VERSION,
        "labels": json.dumps(dict(labels)),
        "step": 0,
        "last_event_id": 0,
        "attempt": 0,
        "failures": 0,
        **values,
    }
    number = tx.execute(insert(tables.jobs).values(row)).inserted_primary_key
    assert number is not None
    if labels:
        tx.execute(
            insert(tables.labels),
            [{"job_number": number[0], "key": key, "value": value} for key, value in labels.items()],
        )
    job = get_job(tx, str(values["id"]))
    assert job is not None
    return job


def get_job(tx: Connection, job_id: str, *, lock: bool = False) -> JobRow | None:
    """The job with this id; `lock` excludes other changes until the transaction ends."""
    query = _JOBS.where(tables.jobs.c.id == job_id)
    return _one_or_none(tx, query.with_for_update() if lock else query)


def get_by_number(tx: Connection, number: int) -> JobRow | None:
    return _one_or_none(tx, _JOBS.where(tables.jobs.c.number == number))


def _one_or_none(tx: Connection, query: Select[Any]) -> JobRow | None:
    row = tx.execute(query).one_or_none()
    return None if row is None else JobRow(*row)


def get_summary(tx: Connection, job_id: str) -> JobSummary | None:
    row = tx.execute(SUMMARIES.where(tables.jobs.c.id == job_id)).one_or_none()
    return None if row is None else JobSummary(*row)


def change_job(
    tx: Connection, number: int, from_states: Collection[str], values: Mapping[str, Any], **column_values: Any
) -> bool:
    """Set `values` if the job is in one of `from_states` and has `column_values`; returns whether it was."""
    job = tables.jobs.c
    conditions = [job[column] == value for column, value in column_values.items()]
    result = tx.execute(
        update(tables.jobs).where(job.number == number, job.state.in_(from_states), *conditions).values(**values)
    )
    return result.rowcount == 1


def set_columns(tx: Connection, number: int, values: Mapping[str, Any]) -> None:
    """Set columns that may change in any state; `change_job` changes states."""
    tx.execute(update(tables.jobs).where(tables.jobs.c.number == number).values(**values))


def delete_job(tx: Connection, number: int) -> None:
    """Delete a job with its labels, writers and events."""
    tx.execute(delete(tables.jobs).where(tables.jobs.c.number == number))


def find_job_with(tx: Connection, text: str, states: Collection[str]) -> str | None:
    """Id of a job in one of the states whose spec has this text; None if there is none."""
    column = tables.jobs.c
    query = select(column.id).where(column.state.in_(states), column.spec.contains(text, autoescape=True))
    return tx.scalar(query.limit(1))


def jobs_in(tx: Connection, states: Collection[str]) -> list[JobRow]:
    """Jobs in any of these states, in order of creation."""
    job = tables.jobs.c
    query = _JOBS.where(job.state.in_(states)).order_by(job.number)
    return [JobRow(*row) for row in tx.execute(query)]


def first_queued(tx: Connection, state: str, fingerprint: str, after: tuple[int, int]) -> JobRow | None:
    """Next queued job after (queued_at, number), except those known not to fit this cluster or held by their sweep."""
    job = tables.jobs.c
    queued_at, number = after
    query = (
        _JOBS.where(job.state == state, job.held == 0)
        .where(or_(job.queued_at > queued_at, and_(job.queued_at == queued_at, job.number > number)))
        .where(or_(job.unfit_for.is_(None), job.unfit_for != fingerprint))
        .order_by(job.queued_at, job.number)
        .limit(1)
    )
    return _one_or_none(tx, query)


def ends_of_queue(tx: Connection, state: str) -> tuple[int, int] | None:
    """(lowest, highest) `queued_at` of jobs in this state that no sweep holds; None without any."""
    job = tables.jobs.c
    is_queued = job.state == state, job.held == 0
    first, last = tx.execute(select(func.min(job.queued_at), func.max(job.queued_at)).where(*is_queued)).one()
    return None if first is None else (first, last)


def jobs_without_plan(tx: Connection, state: str, limit: int) -> list[JobRow]:
    """Jobs in this state without a plan, in queue order, except those known to be too large."""
    job = tables.jobs.c
    query = _JOBS.where(job.state == state, job.plan.is_(None), job.unfit_for.is_(None))
    return [JobRow(*row) for row in tx.execute(query.order_by(job.queued_at, job.number).limit(limit))]


def jobs_marked_unreachable(tx: Connection, state: str, limit: int) -> list[JobRow]:
    """Jobs in this state whose reason says that their cluster is unreachable, oldest first."""
    job = tables.jobs.c
    query = _JOBS.where(job.state == state, job.unreachable_since.is_not(None))
    return [JobRow(*row) for row in tx.execute(query.order_by(job.number).limit(limit))]


def next_to_thin(tx: Connection, states: Collection[str], ended_before: int) -> JobRow | None:
    """A job that ended before `ended_before` and still has events to thin."""
    job = tables.jobs.c
    query = _JOBS.where(job.state.in_(states), job.finished_at < ended_before, job.thinned_to + 1 < job.last_event_id)
    return _one_or_none(tx, query.order_by(job.number).limit(1))


def is_empty(tx: Connection) -> bool:
    """Whether no job was ever stored."""
    job = tx.execute(select(tables.jobs.c.number).limit(1)).first()
    return job is None and tx.execute(select(tables.deletions.c.job_id).limit(1)).first() is None


def count_by_state(tx: Connection) -> dict[str, int]:
    job = tables.jobs.c
    counts = tx.execute(select(job.state, func.count()).group_by(job.state))
    return {row[0]: row[1] for row in counts}
