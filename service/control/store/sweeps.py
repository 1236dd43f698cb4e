"""Sweeps, their members and decisions as rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, and_, case, delete, func, insert, select, update

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class SweepRow:
    """All columns of a sweep."""

    number: int
    id: str
    version: int
    owner: str
    name: str
    body: str
    metric: str
    rungs: str
    state: str
    reason: str
    request: str | None
    created_at: int
    updated_at: int
    finished_at: int | None
    idempotency_key: str | None
    fingerprint: str


@dataclass(frozen=True)
class MemberRow:
    """A member with the columns of its job that decisions and tables need; None for a deleted job."""

    number: int
    job_id: str
    job_number: int
    field_values: str
    rung: int
    is_out: int
    value: str | None
    name: str | None
    state: str | None
    reason: str | None
    request: str | None
    held: int | None
    pause_at: int | None
    step: int | None
    num_steps: int | None
    paused_result: str | None
    """Result of a paused job: at which step."""


@dataclass(frozen=True)
class DecisionRow:
    number: int
    time: int
    actor: str
    data: str


_SWEEPS = select(*(tables.sweeps.c[field.name] for field in fields(SweepRow)))
_MEMBER, _JOB = tables.sweep_members.c, tables.jobs.c
_MEMBERS = select(
    _MEMBER.number, _MEMBER.job_id, _MEMBER.job_number, _MEMBER.field_values, _MEMBER.rung, _MEMBER.is_out,
    _MEMBER.value, _JOB.name, _JOB.state, _JOB.reason, _JOB.request, _JOB.held, _JOB.pause_at, _JOB.step,
    _JOB.num_steps,
    case((_JOB.state == "paused", _JOB.result)),  # others may hold long reports
).select_from(
    tables.sweep_members.outerjoin(
        tables.jobs, and_(_JOB.number == _MEMBER.job_number, _JOB.id == _MEMBER.job_id)
    )
)  # fmt: skip


def _member(row: Sequence[Any]) -> MemberRow:
    return MemberRow(*row)


def insert_sweep(tx: Connection, values: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> SweepRow:
    """Store a new sweep with its members, and return its row."""
    key = tx.execute(insert(tables.sweeps).values({"version": ROW_VERSION, **values})).inserted_primary_key
    assert key is not None
    rows = [{"version": ROW_VERSION, "sweep_number": key[0], "rung": 0, "is_out": 0, **member} for member in members]
    tx.execute(insert(tables.sweep_members), rows)
    sweep = get_sweep(tx, str(values["id"]))
    assert sweep is not None
    return sweep


def get_sweep(tx: Connection, sweep_id: str, *, lock: bool = False) -> SweepRow | None:
    """The sweep with this id; `lock` excludes other changes until the transaction ends."""
    query = _SWEEPS.where(tables.sweeps.c.id == sweep_id)
    row = tx.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else SweepRow(*row)


def sweep_of_key(tx: Connection, owner: str, key: str) -> SweepRow | None:
    """The sweep that was posted with an idempotency key."""
    sweep = tables.sweeps.c
    row = tx.execute(_SWEEPS.where(sweep.owner == owner, sweep.idempotency_key == key)).one_or_none()
    return None if row is None else SweepRow(*row)


def sweeps_in(tx: Connection, states: Collection[str]) -> list[SweepRow]:
    """Sweeps in any of these states, in order of creation."""
    sweep = tables.sweeps.c
    return [SweepRow(*row) for row in tx.execute(_SWEEPS.where(sweep.state.in_(states)).order_by(sweep.number))]


def list_sweeps(
    tx: Connection, states: Collection[str], *, without: str, before: int | None, limit: int
) -> list[SweepRow]:
    """Sweeps newest first, in one of `states` if there are any, and not in the state `without`; `before` is the last
    number seen."""
    sweep = tables.sweeps.c
    query = _SWEEPS.where(sweep.state != without).order_by(sweep.number.desc()).limit(limit)
    if states:
        query = query.where(sweep.state.in_(states))
    if before is not None:
        query = query.where(sweep.number < before)
    return [SweepRow(*row) for row in tx.execute(query)]


def set_sweep(tx: Connection, number: int, from_states: Collection[str], values: Mapping[str, Any]) -> bool:
    """Set columns of a sweep in one of `from_states`; returns whether it was."""
    sweep = tables.sweeps.c
    query = update(tables.sweeps).where(sweep.number == number, sweep.state.in_(from_states)).values(**values)
    return tx.execute(query).rowcount == 1


def members_of(tx: Connection, sweep_number: int) -> list[MemberRow]:
    """Members in the order of their values."""
    query = _MEMBERS.where(_MEMBER.sweep_number == sweep_number).order_by(_MEMBER.number)
    return [_member(row) for row in tx.execute(query)]


def states_of_members(tx: Connection, sweep_numbers: Collection[int]) -> dict[int, dict[str, int]]:
    """Number of members by state of their job, by sweep; deleted jobs count as `deleted`."""
    state = func.coalesce(_JOB.state, "deleted")
    query = (
        select(_MEMBER.sweep_number, state, func.count())
        .select_from(
            tables.sweep_members.outerjoin(
                tables.jobs, and_(_JOB.number == _MEMBER.job_number, _JOB.id == _MEMBER.job_id)
            )
        )
        .where(_MEMBER.sweep_number.in_(sweep_numbers))
        .group_by(_MEMBER.sweep_number, state)
    )
    counts: dict[int, dict[str, int]] = {number: {} for number in sweep_numbers}
    for number, state_name, count in tx.execute(query):
        counts[number][state_name] = count
    return counts


def membership_of(tx: Connection, job_id: str) -> tuple[str, MemberRow] | None:
    """(id of the sweep, member) of a job; None for one of no sweep."""
    row = tx.execute(
        select(tables.sweeps.c.number, tables.sweeps.c.id, _MEMBER.number)
        .join(tables.sweep_members, _MEMBER.sweep_number == tables.sweeps.c.number)
        .where(_MEMBER.job_id == job_id)
    ).one_or_none()
    if row is None:
        return None
    member = tx.execute(_MEMBERS.where(_MEMBER.sweep_number == row[0], _MEMBER.number == row[2])).one()
    return row[1], _member(member)


def set_member(tx: Connection, sweep_number: int, number: int, **values: Any) -> None:
    """Set columns of a member."""
    condition = _MEMBER.sweep_number == sweep_number, _MEMBER.number == number
    tx.execute(update(tables.sweep_members).where(*condition).values(**values))


def delete_members(tx: Connection, sweep_number: int) -> None:
    """Delete a sweep's members and decisions; their jobs are gone already."""
    tx.execute(delete(tables.sweep_members).where(_MEMBER.sweep_number == sweep_number))
    tx.execute(delete(tables.sweep_decisions).where(tables.sweep_decisions.c.sweep_number == sweep_number))


def append_decision(tx: Connection, sweep_number: int, time_us: int, actor: str, data: str) -> None:
    """Store a decision under the sweep's next number."""
    decision = tables.sweep_decisions.c
    last = tx.execute(select(func.max(decision.number)).where(decision.sweep_number == sweep_number)).scalar_one()
    row = {"number": (last or 0) + 1, "version": ROW_VERSION, "time": time_us, "actor": actor, "data": data}
    tx.execute(insert(tables.sweep_decisions).values(sweep_number=sweep_number, **row))


def decisions_of(tx: Connection, sweep_number: int) -> list[DecisionRow]:
    """Decisions about a sweep, in order."""
    decision = tables.sweep_decisions.c
    query = select(decision.number, decision.time, decision.actor, decision.data)
    return [
        DecisionRow(*row)
        for row in tx.execute(query.where(decision.sweep_number == sweep_number).order_by(decision.number))
    ]
