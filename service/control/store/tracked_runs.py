"""Runs of jobs in experiment trackers: a row for each job and tracker."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, and_, func, insert, select, update

from service.control.store import tables


@dataclass(frozen=True)
class TrackedRunRow:
    job_number: int
    tracker: str
    written_to: int
    place: str | None
    trouble: str | None


_RUNS = select(*(tables.tracked_runs.c[field.name] for field in fields(TrackedRunRow)))


def insert_tracked_runs(tx: Connection, job_number: int, trackers: Sequence[str]) -> None:
    rows = [{"job_number": job_number, "tracker": tracker, "written_to": 0} for tracker in trackers]
    if rows:
        tx.execute(insert(tables.tracked_runs), rows)


def tracked_runs_of(tx: Connection, job_number: int) -> list[TrackedRunRow]:
    run = tables.tracked_runs.c
    return [TrackedRunRow(*row) for row in tx.execute(_RUNS.where(run.job_number == job_number).order_by(run.tracker))]


def unwritten_runs(tx: Connection) -> list[TrackedRunRow]:
    """Runs whose jobs have later events than the tracker."""
    run, job = tables.tracked_runs.c, tables.jobs.c
    later = and_(job.number == run.job_number, job.last_event_id > run.written_to)
    query = _RUNS.join(tables.jobs, later).order_by(run.job_number, run.tracker)
    return [TrackedRunRow(*row) for row in tx.execute(query)]


def change_tracked_run(tx: Connection, row: TrackedRunRow, **values: Any) -> None:
    run = tables.tracked_runs.c
    condition = and_(run.job_number == row.job_number, run.tracker == row.tracker)
    tx.execute(update(tables.tracked_runs).where(condition).values(**values))


def first_metric_after(tx: Connection, job_number: int, step: int) -> int | None:
    """Id of the first metric of a later step; None without any."""
    event = tables.events.c
    conditions = (event.job_number == job_number, event.kind == "metric", event.step > step)
    event_id: int | None = tx.execute(select(func.min(event.id)).where(*conditions)).scalar_one()
    return event_id


@dataclass(frozen=True)
class MetricRow:
    """Event of a recorded step."""

    id: int
    time: int
    attempt: int
    group: int
    step: int
    superseded: str | None
    data: str


_METRICS = select(*(tables.events.c[field.name] for field in fields(MetricRow)))


def metrics_after(tx: Connection, job_number: int, event_id: int, through: int, limit: int) -> list[MetricRow]:
    """The first metrics after an event, up to the event `through`; not those without a valid step or writer."""
    event = tables.events.c
    conditions = (event.job_number == job_number, event.kind == "metric", event.id > event_id, event.id <= through)
    has_writer = (event.step.is_not(None), event.attempt.is_not(None), event.group.is_not(None))
    query = _METRICS.where(*conditions, *has_writer).order_by(event.id).limit(limit)
    return [MetricRow(*row) for row in tx.execute(query)]


def newest_event(tx: Connection, job_number: int, kind: str) -> int:
    """Id of the newest event of a kind; 0 without any."""
    event = tables.events.c
    query = select(func.max(event.id)).where(event.job_number == job_number, event.kind == kind)
    return tx.execute(query).scalar_one() or 0


def steps_after(tx: Connection, job_number: int, event_id: int) -> tuple[int, int] | None:
    """(first, last) step of the metrics after an event; None without any."""
    event = tables.events.c
    conditions = (event.job_number == job_number, event.kind == "metric", event.id > event_id)
    first, last = tx.execute(select(func.min(event.step), func.max(event.step)).where(*conditions)).one()
    return None if first is None else (first, last)
