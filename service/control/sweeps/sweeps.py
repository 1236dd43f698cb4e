"""Sweeps in progress: observes members, asks the policy, and carries out one decision per sweep and step.

A decision and all that follows from it in the store is one transaction. So a control plane killed at any moment has
either decided or not, and the next one continues from the rows; runs are launched by the controller alone, from them.
"""

import json
from collections import defaultdict
from collections.abc import Sequence

import structlog
from sqlalchemy import Connection

from moe.spec.sweep import SweepSpec
from service.control.errors import ServiceError
from service.control.jobs.changes import explain, set_state
from service.control.jobs.lease import Lease, LeaseLost
from service.control.report.event_text import WireEvent, data_text
from service.control.retention.deletions import Deletions
from service.control.scheduling.deduplicator import Deduplicator
from service.control.scheduling.requests import cancel_job
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import JobRow, get_job, set_columns
from service.control.store.sweeps import (
    MemberRow,
    SweepRow,
    append_decision,
    delete_members,
    get_sweep,
    members_of,
    set_member,
    set_sweep,
    sweeps_in,
)
from service.control.sweeps.policy import (
    CancelMembers,
    Choose,
    EndSweep,
    MemberFacts,
    Start,
    SweepDecision,
    SweepFacts,
    Wait,
    decide,
)
from service.control.sweeps.results import StoredValue, is_at_rung, is_settled, last_value, read_stored
from service.control.sweeps.states import SweepState
from service.wire.states import OVER, STUCK, WAITS, State

ACTOR = "sweep"
JobEvents = defaultdict[str, list[WireEvent]]
log = structlog.get_logger(__name__)


class Sweeps:
    """The controller's chore for sweeps."""

    def __init__(self, database: Database, lease: Lease, deletions: Deletions) -> None:
        self._database, self._lease, self._deletions = database, lease, deletions
        self._specs: dict[int, SweepSpec] = {}
        self._deduplicator = Deduplicator()

    def step(self) -> bool:
        """Take the next decision about each sweep; False if there was nothing to do. Raises LeaseLost."""
        with self._database.read() as tx:
            sweeps = sweeps_in(tx, {SweepState.RUNNING, SweepState.DELETING})
        numbers = {sweep.number for sweep in sweeps}
        self._specs = {number: spec for number, spec in self._specs.items() if number in numbers}
        self._deduplicator.keep_only(numbers)
        did_work = False
        for sweep in sweeps:
            try:
                did_work |= self._delete(sweep) if sweep.state == SweepState.DELETING else self._advance(sweep)
            except LeaseLost:
                raise
            except Exception as error:  # such as a row of a newer release; the other sweeps continue
                if self._deduplicator.is_new(sweep.number, repr(error)):
                    log.exception("a sweep cannot be advanced; its jobs go on", sweep=sweep.id)
        return did_work

    def _spec(self, sweep: SweepRow) -> SweepSpec:
        if sweep.number not in self._specs:
            self._specs[sweep.number] = SweepSpec.model_validate(json.loads(sweep.body)["sweep"])
        return self._specs[sweep.number]

    def _advance(self, sweep: SweepRow) -> bool:
        with self._database.read() as tx:
            members = members_of(tx, sweep.number)
        if without_value := [member for member in members if is_settled(member) and read_stored(member) is None]:
            self._store_values(sweep, without_value)
            return True
        decision = decide(facts_of(sweep, self._spec(sweep), members))
        if isinstance(decision, Wait) and decision.reason == sweep.reason:
            return False
        if not isinstance(decision, Wait):
            log.info("decided", sweep=sweep.id, decision=type(decision).__name__.lower(),
                     reason=getattr(decision, "reason", ""))  # fmt: skip
        with self._lease.change_jobs() as (tx, events):
            self._carry_out(tx, events, sweep, members, decision)
        return not isinstance(decision, Wait)

    def _store_values(self, sweep: SweepRow, members: Sequence[MemberRow]) -> None:
        """Store the last values of members that record nothing further, so that they outlive the jobs and need no
        search."""
        with self._lease.change_jobs() as (tx, _):
            for member in members:
                value = StoredValue(member.step or 0, last_value(tx, member.job_number, sweep.metric))
                set_member(tx, sweep.number, member.number, value=value.to_text())

    def _carry_out(
        self, tx: Connection, events: JobEvents, sweep: SweepRow, members: Sequence[MemberRow], decision: SweepDecision
    ) -> None:
        """Make all changes of a decision, in one transaction; none if the sweep or a member has changed meanwhile."""
        # Before its jobs: the same order in all transactions that lock both.
        current_sweep = get_sweep(tx, sweep.id, lock=True)
        if current_sweep is None or (current_sweep.state, current_sweep.request) != (sweep.state, sweep.request):
            return
        if [_standing(member) for member in members_of(tx, sweep.number)] != [_standing(member) for member in members]:
            return
        by_number = {member.number: member for member in members}
        match decision:
            case Wait(reason):
                set_sweep(tx, sweep.number, {SweepState.RUNNING}, {"reason": reason, "updated_at": now_us()})
            case Start(numbers, reason):
                for number in numbers:
                    if (job := _lock_job(tx, by_number[number])) is not None and job.state == State.QUEUED:
                        values = {"held": 0, "queued_at": now_us()}
                        events[job.id] += explain(tx, job, f"{WAITS}; {reason}", ACTOR, values)
            case Choose(rung, step, continues, stops, reason):
                self._choose(tx, events, sweep, by_number, decision)
                self._record(tx, sweep, "choose", reason, rung=rung, step=step, continues=continues, stops=stops)
            case CancelMembers(numbers):
                for number in numbers:
                    job = _lock_job(tx, by_number[number])
                    if job is not None and job.state not in OVER:
                        events[job.id] += cancel_job(tx, job, "its sweep", ACTOR)
            case EndSweep(state, reason):
                columns = {"state": state, "reason": reason, "updated_at": now_us(), "finished_at": now_us()}
                if set_sweep(tx, sweep.number, {SweepState.RUNNING}, columns):
                    for member in members:
                        set_columns(tx, member.job_number, {"held": 0, "pause_at": None})
                    self._record(tx, sweep, "end", reason, state=state)

    def _choose(
        self, tx: Connection, events: JobEvents, sweep: SweepRow, members: dict[int, MemberRow], choice: Choose
    ) -> None:
        rungs: list[int] = json.loads(sweep.rungs)
        pause_at = rungs[choice.rung + 1] if choice.rung + 1 < len(rungs) else None
        until = f"to step {pause_at}" if pause_at else "to its last step"
        rung_text = f"rung {choice.rung + 1} of {sweep.id}, at step {choice.step}"
        for rank, number in enumerate(choice.continues, start=1):
            member, job = members[number], _lock_job(tx, members[number])
            set_member(tx, sweep.number, number, rung=choice.rung + 1)
            if job is not None and job.state == State.PAUSED:
                reason = f"goes on {until}: number {rank} at {rung_text}, with {sweep.metric} {_value_text(member)}"
                # As after a user's `resume`: failures count per run.
                values = {
                    "held": 1, "pause_at": pause_at, "queued_at": now_us(), "unfit_for": None, "failures": 0,
                    "losses": None,
                }  # fmt: skip
                events[job.id] += set_state(tx, job, State.QUEUED, reason, ACTOR, values)
        for number in choice.stops:
            member, job = members[number], _lock_job(tx, members[number])
            set_member(tx, sweep.number, number, is_out=1)
            if job is None:
                continue
            set_columns(tx, job.number, {"pause_at": None})  # resumed by a user, it runs to its end
            if job.state == State.PAUSED:
                reason = (
                    f"stopped at {rung_text}, with {sweep.metric} {_value_text(member)}: not among the best "
                    f"{len(choice.continues)}; its checkpoint is kept"
                )
                events[job.id] += set_state(tx, job, State.CANCELLED, reason, ACTOR)

    def _record(self, tx: Connection, sweep: SweepRow, kind: str, reason: str, **data: object) -> None:
        append_decision(tx, sweep.number, now_us(), ACTOR, data_text({"kind": kind, "reason": reason, **data}))
        set_sweep(tx, sweep.number, set(SweepState), {"reason": reason, "updated_at": now_us()})

    def _delete(self, sweep: SweepRow) -> bool:
        """Request the deletion of the members; forget them once they are gone."""
        with self._database.read() as tx:
            members = [member for member in members_of(tx, sweep.number) if member.state is not None]
        did_work, faults = False, []
        for member in members:
            if member.state != State.DELETING:
                try:
                    self._deletions.ask(member.job_id, sweep.owner)
                    did_work = True
                except ServiceError as error:
                    faults.append(error.detail)
        reason = f"{STUCK}{faults[0]}" if faults else f"deleting {len(members)} jobs"
        if members and reason == sweep.reason:
            return did_work
        with self._lease.change_jobs() as (tx, _):
            values: dict[str, object] = {"reason": reason, "updated_at": now_us()}
            if not members:
                delete_members(tx, sweep.number)
                values |= {"state": SweepState.DELETED, "reason": "deleted", "finished_at": now_us()}
            set_sweep(tx, sweep.number, {SweepState.DELETING}, values)
        return did_work or not members


def facts_of(sweep: SweepRow, spec: SweepSpec, members: Sequence[MemberRow]) -> SweepFacts:
    """Facts that the policy decides from."""
    return SweepFacts(
        members=tuple(_facts_of_member(member) for member in members),
        metric=sweep.metric,
        mode=spec.mode,
        max_parallel=spec.max_parallel,
        rungs=tuple(json.loads(sweep.rungs)),
        factor=spec.halving_factor,
        is_cancelled=sweep.request == "cancel",
    )


def _facts_of_member(member: MemberRow) -> MemberFacts:
    stored_value = read_stored(member)
    return MemberFacts(
        number=member.number,
        name=member.name or member.job_id,
        state=State(member.state or State.DELETING),
        held=bool(member.held),
        rung=member.rung,
        is_out=bool(member.is_out),
        is_at_rung=is_at_rung(member),
        is_cancelling=member.request == "cancel",
        value=None if stored_value is None or stored_value.value is None else stored_value.value.value,
    )


def _standing(member: MemberRow) -> tuple[object, ...]:
    """Columns of a member that decisions depend on."""
    return member.state, member.held, member.request, member.rung, member.is_out, is_at_rung(member), member.value


def _lock_job(tx: Connection, member: MemberRow) -> JobRow | None:
    """The member's job, locked; None once it is deleted."""
    return get_job(tx, member.job_id, lock=True)


def _value_text(member: MemberRow) -> str:
    stored_value = read_stored(member)
    return "not recorded" if stored_value is None or stored_value.value is None else f"{stored_value.value.value:.4g}"
