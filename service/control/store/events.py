"""Events as rows: one sequence per job, read from any point, sampled by step."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    Subquery,
    and_,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class NewEvent:
    """An event without an id yet."""

    kind: str
    time: int
    attempt: int | None
    actor: str
    data: str
    """JSON text, stored and sent verbatim."""
    step: int | None = None
    group: int | None = None
    superseded: str | None = None
    """Value of the wire event's `superseded`."""


@dataclass(frozen=True)
class EventRow:
    id: int
    kind: str
    time: int
    attempt: int | None
    actor: str
    data: str
    superseded: str | None = None


class MetricRow(NamedTuple):
    """A metric event, with the attempt and group that decide which record of a repeated step is the newest."""

    id: int
    step: int
    attempt: int | None
    group: int | None
    time: int
    data: str


_EVENT = [tables.events.c[field.name] for field in fields(EventRow)]


def newest_events(tx: Connection, job_number: int, kind: str, attempt: int | None, limit: int) -> list[EventRow]:
    """Newest events of a kind, newest first, of `attempt` or of all."""
    event = tables.events.c
    conditions = [event.job_number == job_number, event.kind == kind]
    if attempt is not None:
        conditions.append(event.attempt == attempt)
    query = select(*_EVENT).where(*conditions).order_by(event.id.desc()).limit(limit)
    return [EventRow(*row) for row in tx.execute(query)]


def newest_by_step(tx: Connection, job_number: int, kind: str, name: str, limit: int) -> list[EventRow]:
    """Events with the key `name` by step, the last step first; of a repeated step, the newest attempt and group
    first."""
    event = tables.events.c
    order = event.step.desc(), event.attempt.desc(), event.group.desc(), event.id.desc()
    query = select(*_EVENT).where(*_event_conditions(job_number, kind, 0, name)).order_by(*order).limit(limit)
    return [EventRow(*row) for row in tx.execute(query)]


def last_event_id(tx: Connection, job_number: int) -> int:
    """Id of the job's newest event; 0 without any."""
    job = tables.jobs.c
    return tx.execute(select(job.last_event_id).where(job.number == job_number)).scalar_one_or_none() or 0


def metric_rows(tx: Connection, job_number: int, after_id: int, to_id: int) -> Iterator[Sequence[MetricRow]]:
    """Metric events of a range of ids, in order, in portions that are read as they are taken."""
    event = tables.events.c
    columns = [event.id, event.step, event.attempt, event.group, event.time, event.data]
    in_range = (event.id > after_id, event.id <= to_id, event.step.is_not(None))
    query = select(*columns).where(event.job_number == job_number, *in_range, event.kind == "metric").order_by(event.id)
    with tx.execute(query, execution_options={"yield_per": 500}) as rows:
        for portion in rows.partitions():
            yield cast(Sequence[MetricRow], portion)  # rows are named tuples of the same fields


def furthest_step(tx: Connection, job_number: int, kind: str) -> int:
    """Highest step of a kind of event; 0 without any."""
    event = tables.events.c
    query = select(func.max(event.step)).where(event.job_number == job_number, event.kind == kind)
    return tx.execute(query).scalar_one() or 0


def redone_steps(
    tx: Connection, job_number: int, kind: str, steps: Collection[int], attempt: int, group: int
) -> set[int]:
    """The subset of `steps` that a newer attempt or worker group has recorded."""
    event = tables.events.c
    newer = or_(event.attempt > attempt, and_(event.attempt == attempt, event.group > group))
    sorted_steps, newer_steps = sorted(steps), set[int]()
    for start in range(0, len(sorted_steps), 500):  # databases limit the parameters of one query
        in_chunk = event.step.in_(sorted_steps[start : start + 500])
        query = select(event.step).where(event.job_number == job_number, event.kind == kind, in_chunk, newer)
        newer_steps |= {step for (step,) in tx.execute(query)}
    return newer_steps


def append_events(tx: Connection, job_number: int, new_events: Sequence[NewEvent]) -> list[EventRow]:
    """Store events under the job's next ids, and return them."""
    if not new_events:
        return []
    job = tables.jobs.c
    increment = (
        update(tables.jobs)
        .where(job.number == job_number)
        .values(last_event_id=job.last_event_id + len(new_events))
        .returning(job.last_event_id)
    )
    first = tx.execute(increment).scalar_one() - len(new_events) + 1
    rows: list[dict[str, Any]] = [
        {"job_number": job_number, "id": id, "version": ROW_VERSION, **vars(event)}
        for id, event in enumerate(new_events, start=first)
    ]
    tx.execute(insert(tables.events), rows)
    return [
        EventRow(id, event.kind, event.time, event.attempt, event.actor, event.data, event.superseded)
        for id, event in enumerate(new_events, start=first)
    ]


def events_after(
    tx: Connection, job_number: int, last_id: int, limit: int, kinds: Sequence[str] = ()
) -> list[EventRow]:
    event = tables.events.c
    query = select(*_EVENT).where(event.job_number == job_number, event.id > last_id).order_by(event.id).limit(limit)
    if kinds:
        query = query.where(event.kind.in_(kinds))
    return [EventRow(**row._mapping) for row in tx.execute(query)]


def events_before(
    tx: Connection, job_number: int, before_id: int | None, limit: int, kinds: Sequence[str]
) -> list[EventRow]:
    """Events of these kinds, newest first, before an id or all."""
    event = tables.events.c
    query = select(*_EVENT).where(event.job_number == job_number, event.kind.in_(kinds))
    if "metric" not in kinds:
        query = query.where(
            literal_column("kind") != literal_column("'metric'")
        )  # the condition of `ix_events_history`
    if before_id is not None:
        query = query.where(event.id < before_id)
    return [EventRow(*row) for row in tx.execute(query.order_by(event.id.desc()).limit(limit))]


def delete_oldest_events(tx: Connection, job_number: int, limit: int) -> bool:
    """Delete at most `limit` events of a job; False if there were none."""
    event = tables.events.c
    first = tx.execute(select(func.min(event.id)).where(event.job_number == job_number)).scalar_one()
    if first is None:
        return False
    tx.execute(delete(tables.events).where(event.job_number == job_number, event.id < first + limit))
    return True


def delete_events_of(tx: Connection, job_number: int, kind: str, below_id: int, limit: int) -> bool:
    """Delete at most `limit` events of one kind; False if there were none."""
    event = tables.events.c
    conditions = (event.job_number == job_number, event.kind == kind, event.id < below_id)
    ids = list(tx.scalars(select(event.id).where(*conditions).order_by(event.id).limit(limit)))
    if not ids:
        return False
    tx.execute(delete(tables.events).where(*conditions, event.id <= ids[-1]))
    return True


def sampled_by_step(
    tx: Connection, job_number: int, kind: str, since_step: int, limit: int, name: str | None = None
) -> list[int]:
    """Ids of at most `limit` events, evenly spread over the steps from `since_step` on, including the first and last;
    of a repeated step, the newest attempt's and group's. With `name`, only events with that key.

    The database selects, so that millions of steps take no memory.
    """
    event = tables.events.c
    conditions = _event_conditions(job_number, kind, since_step, name)
    total = tx.execute(select(func.count(event.step.distinct())).where(*conditions)).scalar_one()
    recorded_rows = _by_age(conditions)
    index = (func.row_number().over(order_by=recorded_rows.c.step) - 1).label("step_index")
    numbered_rows = select(recorded_rows.c.id, index).where(recorded_rows.c.age == 1).subquery()
    query = select(numbered_rows.c.id).order_by(numbered_rows.c.step_index)
    if limit == 1:
        query = query.where(numbered_rows.c.step_index == total - 1)
    elif total > limit:
        # Each of the `limit - 1` equal intervals of 0..total-1 is represented by the first index past its end.
        def stretch(index: ColumnElement[int]) -> ColumnElement[int]:
            return index * (limit - 1) // (total - 1)

        position = numbered_rows.c.step_index
        query = query.where(or_(position == 0, and_(position > 0, stretch(position) > stretch(position - 1))))
    return [id for (id,) in tx.execute(query)]


def first_by_step(
    tx: Connection, job_number: int, kind: str, since_step: int, limit: int, name: str | None = None
) -> list[int]:
    """Ids of the events of the first `limit` steps from `since_step` on, otherwise as `sampled_by_step`."""
    event = tables.events.c
    conditions = _event_conditions(job_number, kind, since_step, name)
    first = select(event.step).where(*conditions).distinct().order_by(event.step).limit(limit).subquery()
    last = tx.execute(select(func.max(first.c.step))).scalar_one()
    if last is None:
        return []
    recorded_rows = _by_age([*conditions, event.step <= last])
    return list(tx.scalars(select(recorded_rows.c.id).where(recorded_rows.c.age == 1).order_by(recorded_rows.c.step)))


def _event_conditions(job_number: int, kind: str, since_step: int, name: str | None) -> list[ColumnElement[bool]]:
    event = tables.events.c
    conditions = [event.job_number == job_number, event.kind == kind, event.step >= since_step]
    if name is not None:
        # All databases can search text; the caller filters data that has the key at a deeper level.
        conditions.append(event.data.contains(f"{json.dumps(name, ensure_ascii=False)}:", autoescape=True))
    return conditions


def _by_age(conditions: Sequence[ColumnElement[bool]]) -> Subquery:
    """Subquery of step, id and `age`: 1 for the newest of its step."""
    event = tables.events.c
    newest_first = (event.attempt.desc(), event.group.desc(), event.id.desc())
    age = func.row_number().over(partition_by=event.step, order_by=newest_first).label("age")
    return select(event.step, event.id, age).where(*conditions).subquery()


def events_by_id(tx: Connection, job_number: int, ids: Sequence[int]) -> list[EventRow]:
    """Events by their ids, in order."""
    event = tables.events.c
    rows: list[EventRow] = []
    for start in range(0, len(ids), 500):  # databases limit the parameters of one query
        query = select(*_EVENT).where(event.job_number == job_number, event.id.in_(ids[start : start + 500]))
        rows.extend(EventRow(**row._mapping) for row in tx.execute(query))
    return sorted(rows, key=lambda row: row.id)
