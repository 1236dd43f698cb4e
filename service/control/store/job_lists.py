"""Lists of jobs: filtered, sorted, and in pages."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, and_, cast, func, null, or_, select

from service.control.store import tables
from service.control.store.jobs import SUMMARIES, JobSummary


@dataclass(frozen=True)
class JobFilter:
    """Conditions of a job list, all of which must hold."""

    states: Collection[str] = ()
    labels: Sequence[tuple[str, str | None]] = ()
    """(key, value) pairs; a value of None matches any."""
    name: str | None = None
    owner: str | None = None
    search: str | None = None
    """Text that occurs in the job's name or id, in any case."""

    def conditions(self) -> list[ColumnElement[bool]]:
        job = tables.jobs.c
        conditions: list[ColumnElement[bool]] = []
        if self.states:
            conditions.append(job.state.in_(self.states))
        if self.name is not None:
            conditions.append(job.name == self.name)
        if self.owner is not None:
            conditions.append(job.owner == self.owner)
        if self.search:
            text = self.search.lower()
            conditions.append(
                or_(func.lower(job.name).contains(text, autoescape=True), job.id.contains(text, autoescape=True))
            )
        for key, value in self.labels:
            label = tables.labels.alias()
            match = and_(label.c.job_number == job.number, label.c.key == key)
            if value is not None:
                match = and_(match, label.c.value == value)
            conditions.append(select(label.c.key).where(match).exists())
        return conditions


class JobSort(StrEnum):
    """Orders of a list; among equal ones, newer jobs come first."""

    NEWEST = "newest"
    OLDEST = "oldest"
    NAME = "name"
    NAME_DOWN = "-name"
    STATE = "state"
    STATE_DOWN = "-state"
    PROGRESS = "progress"
    PROGRESS_DOWN = "-progress"
    LOSS = "loss"
    LOSS_DOWN = "-loss"

    @property
    def is_descending(self) -> bool:
        return self.value.startswith("-")

    def key(self) -> ColumnElement[Any] | None:
        """Column or expression that jobs are sorted by, before their number; None for orders by number alone."""
        job = tables.jobs.c
        keys: dict[str, ColumnElement[Any]] = {
            "name": job.name,
            "state": job.state,
            "progress": cast(job.step, Float) / func.nullif(job.num_steps, 0),
            "loss": job.loss,
        }
        return keys.get(self.value.removeprefix("-"))


@dataclass(frozen=True)
class Mark:
    """The last job of a page."""

    number: int
    value: str | float | None = None
    """Its value of the sort key; None without one."""


def list_jobs(
    tx: Connection,
    job_filter: JobFilter = JobFilter(),
    sort: JobSort = JobSort.NEWEST,
    *,
    after: Mark | None = None,
    limit: int,
) -> tuple[list[JobSummary], Mark | None]:
    """Jobs after the mark of the page before, and the mark of this page's end; None if it is the last. Jobs without a
    value of the sort key come last."""
    number = tables.jobs.c.number
    key = sort.key()
    order: list[ColumnElement[Any]] = [number.asc() if sort is JobSort.OLDEST else number.desc()]
    if key is not None:
        order = [key.is_(None), key.desc() if sort.is_descending else key.asc(), *order]
    # Numbers first, which the index has: only the page's own rows are read.
    columns = [number, key if key is not None else null()]
    query = select(*columns).where(*job_filter.conditions()).order_by(*order).limit(limit + 1)
    if after is not None:
        query = query.where(_follows(after, sort, key))
    marks = [Mark(row[0], row[1]) for row in tx.execute(query)]
    page = marks[:limit]
    rows = tx.execute(SUMMARIES.where(number.in_([mark.number for mark in page])))
    summaries = {row[0]: JobSummary(*row) for row in rows}
    # Between the two queries, some databases let others delete a job.
    return [summaries[mark.number] for mark in page if mark.number in summaries], page[-1] if len(
        marks
    ) > limit else None


def _follows(mark: Mark, sort: JobSort, key: ColumnElement[Any] | None) -> ColumnElement[bool]:
    """Whether a job comes after the mark."""
    number = tables.jobs.c.number
    is_older = number > mark.number if sort is JobSort.OLDEST else number < mark.number
    if key is None:
        return is_older
    if mark.value is None:
        return and_(key.is_(None), is_older)
    is_later = key < mark.value if sort.is_descending else key > mark.value
    return or_(is_later, key.is_(None), and_(key == mark.value, is_older))


def count_states(tx: Connection, job_filter: JobFilter) -> dict[str, int]:
    """Number of jobs in each state, of those that match the filter apart from its states."""
    job = tables.jobs.c
    conditions = replace(job_filter, states=()).conditions()
    counts = tx.execute(select(job.state, func.count()).where(*conditions).group_by(job.state))
    return {row[0]: row[1] for row in counts}
