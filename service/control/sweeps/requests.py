"""Users' requests for sweeps: post, pause, resume, cancel, delete. Each answer is durable."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from sqlalchemy import Connection

from moe.spec.sweep import SweepRequest
from service.control.errors import Conflict, Gone, NotFound
from service.control.report.event_text import WireEvent
from service.control.report.hub import Hub
from service.control.scheduling.job_plans import PlanForecast
from service.control.scheduling.new_jobs import digest_of
from service.control.scheduling.requests import Requests, actor_of, must_expand, new_job_id, pause_job, resume_job
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import JobRow, get_job
from service.control.store.sweeps import (
    SweepRow,
    append_decision,
    get_sweep,
    insert_sweep,
    members_of,
    set_sweep,
    sweep_of_key,
)
from service.control.sweeps.member_file import MemberFile
from service.control.sweeps.results import is_at_rung
from service.control.sweeps.states import ENDED_SWEEP, UNFINISHED_SWEEP, SweepState
from service.wire.states import ACTIVE, ENDED, State

PAUSABLE = ACTIVE - {State.PAUSING} | {State.QUEUED}
"""States of members that a pause of their sweep pauses."""
DELETABLE = ENDED | {State.PAUSED, State.DELETING}
"""States of members of a sweep that can be deleted."""


class SweepRequests:
    """Handles users' requests for sweeps. `wake` starts the controller's next step."""

    def __init__(self, database: Database, hub: Hub, requests: Requests, wake: Callable[[], None]) -> None:
        self._database, self._hub, self._requests, self._wake = database, hub, requests, wake

    def post(self, body: Any, owner: str, key: str | None = None) -> tuple[SweepRow, bool]:
        """(stored sweep, whether it is new): all its jobs are stored, or none. The same `key` and body give the same
        sweep. Raises SpecError with the problems of all members, Conflict, Full, Unavailable."""
        fingerprint = digest_of(body)
        if key is not None:
            with self._database.read() as tx:
                if (previous := _sweep_of_key(tx, owner, key, fingerprint)) is not None:
                    return previous, False
        sweep_id = new_job_id("sweep")
        request = SweepRequest.parse(body, sweep_id, self._expand)
        new_jobs = self._requests.new_jobs
        forecasts: dict[str, PlanForecast] = {}
        checked_jobs = request.for_all(lambda member: new_jobs.check(member.spec, new_job_id(), owner, forecasts))
        time_us, actor = now_us(), actor_of(owner)
        events: dict[str, list[WireEvent]] = {}
        with ExitStack() as drafts:
            draft_jobs = [drafts.enter_context(new_jobs.draft(job)) for job in checked_jobs]
            for member, draft in zip(request.members, draft_jobs, strict=True):
                file = MemberFile(
                    sweep_id=sweep_id, sweep_name=request.name, metric=request.metric, rungs=tuple(request.rungs),
                    body=body, created_at_us=time_us, number=member.number, values=dict(member.values),
                )  # fmt: skip
                new_jobs.write(draft, file.write)
            with self._database.write() as tx:
                # Checked again inside the transaction: two posts with one key may run concurrently.
                if key is not None and (previous := _sweep_of_key(tx, owner, key, fingerprint)) is not None:
                    return previous, False
                rows = []
                for member, draft in zip(request.members, draft_jobs, strict=True):
                    columns = {"held": 1, "pause_at": request.rungs[0] if request.rungs else None}
                    job, events[draft.job.id] = new_jobs.store(tx, draft, actor, columns)
                    rows.append({"number": member.number, "job_id": job.id, "job_number": job.number,
                                 "field_values": json.dumps(member.values)})  # fmt: skip
                sweep = insert_sweep(
                    tx,
                    {"id": sweep_id, "owner": owner, "name": request.name, "body": json.dumps(body),
                     "metric": request.metric, "rungs": json.dumps(request.rungs), "state": SweepState.RUNNING,
                     "reason": f"{len(rows)} jobs to start", "created_at": time_us, "updated_at": time_us,
                     "idempotency_key": key, "fingerprint": fingerprint},
                    rows,
                )  # fmt: skip
            for draft in draft_jobs:
                draft.is_stored = True
        self._publish(events)
        return sweep, True

    def cancel(self, sweep_id: str, owner: str) -> SweepRow:
        """Request the end of all members that have not ended. Raises NotFound, Gone, Conflict."""
        with self._database.write() as tx:
            sweep = find_sweep(tx, sweep_id, lock=True)
            if sweep.state not in UNFINISHED_SWEEP:
                raise Conflict(f"{sweep_id} has ended ({sweep.state}); only an unfinished sweep can be cancelled")
            if sweep.request is None:
                _record_request(tx, sweep, "cancel", owner, {"request": "cancel", "state": SweepState.RUNNING})
            sweep = find_sweep(tx, sweep_id)
        self._wake()
        return sweep

    def pause(self, sweep_id: str, owner: str) -> SweepRow:
        """Request the pause of all members that run, and start no others. Raises NotFound, Gone, Conflict."""
        events: dict[str, list[WireEvent]] = {}
        with self._database.write() as tx:
            sweep = _unfinished(tx, sweep_id, "paused")
            if sweep.state == SweepState.RUNNING:
                for job in _jobs_of(tx, sweep):
                    if job.state in PAUSABLE and not job.held and job.request is None:
                        events[job.id] = pause_job(tx, job, owner, actor_of(owner))
                _record_request(tx, sweep, "pause", owner, {"state": SweepState.PAUSED})
            sweep = find_sweep(tx, sweep_id)
        self._publish(events)
        return sweep

    def resume(self, sweep_id: str, owner: str) -> SweepRow:
        """Continue a paused sweep: its paused members wait to be started again. Raises NotFound, Gone, Conflict,
        also while a member is still pausing."""
        events: dict[str, list[WireEvent]] = {}
        with self._database.write() as tx:
            sweep = _unfinished(tx, sweep_id, "resumed")
            if sweep.state == SweepState.PAUSED:
                at_rung = {row.job_id for row in members_of(tx, sweep.number) if is_at_rung(row)}
                for job in _jobs_of(tx, sweep):
                    if job.state == State.PAUSING:
                        raise Conflict(f"{job.id} of {sweep_id} is still pausing; wait until it is paused")
                    if job.state == State.PAUSED and job.id not in at_rung:
                        self._requests.uploads.require_present(tx, job.spec)
                        events[job.id] = resume_job(tx, job, owner, actor_of(owner), {"held": 1})
                _record_request(tx, sweep, "resume", owner, {"state": SweepState.RUNNING})
            sweep = find_sweep(tx, sweep_id)
        self._publish(events)
        return sweep

    def delete(self, sweep_id: str, owner: str) -> SweepRow:
        """Request the deletion of an ended sweep with all its jobs (idempotent). Raises NotFound, and Conflict for a
        sweep that runs or has a job that may run."""
        with self._database.write() as tx:
            sweep = get_sweep(tx, sweep_id, lock=True)
            if sweep is None:
                raise _absence(sweep_id)
            if sweep.state in ENDED_SWEEP:
                unfinished = [member.job_id for member in members_of(tx, sweep.number)
                              if member.state is not None and member.state not in DELETABLE]  # fmt: skip
                if unfinished:
                    raise Conflict(f"{unfinished[0]} of {sweep_id} has not ended; cancel it first")
                values = {"state": SweepState.DELETING, "reason": f"deletion requested by {owner}",
                          "updated_at": now_us()}  # fmt: skip
                set_sweep(tx, sweep.number, ENDED_SWEEP, values)
            elif sweep.state in UNFINISHED_SWEEP:
                raise Conflict(
                    f"{sweep_id} is {sweep.state}; only a sweep that has ended can be deleted; cancel it first"
                )
            sweep = get_sweep(tx, sweep_id) or sweep
        self._wake()
        return sweep

    def _publish(self, events: Mapping[str, list[WireEvent]]) -> None:
        for job_id, job_events in events.items():
            self._hub.publish(job_id, job_events)
        self._wake()

    def _expand(self, job: Any) -> Any:
        return self._requests.expand(job) if must_expand(job) else job


def find_sweep(tx: Connection, sweep_id: str, *, lock: bool = False) -> SweepRow:
    """The sweep with this id. Raises NotFound, and Gone for a deleted one."""
    sweep = get_sweep(tx, sweep_id, lock=lock)
    if sweep is None:
        raise _absence(sweep_id)
    if sweep.state == SweepState.DELETED:
        raise Gone(f"{sweep_id} was deleted")
    return sweep


def _unfinished(tx: Connection, sweep_id: str, verb: str) -> SweepRow:
    """A sweep that has not ended and is not being cancelled, locked. Raises NotFound, Gone, Conflict."""
    sweep = find_sweep(tx, sweep_id, lock=True)
    if sweep.state not in UNFINISHED_SWEEP:
        raise Conflict(f"{sweep_id} has ended ({sweep.state}); only an unfinished sweep can be {verb}")
    if sweep.request == "cancel":
        raise Conflict(f"{sweep_id} is being cancelled and can no longer be {verb}")
    return sweep


def _jobs_of(tx: Connection, sweep: SweepRow) -> Iterator[JobRow]:
    """Jobs of a sweep, locked one after the other."""
    for member in members_of(tx, sweep.number):
        if (job := get_job(tx, member.job_id, lock=True)) is not None:
            yield job


def _record_request(tx: Connection, sweep: SweepRow, kind: str, owner: str, values: Mapping[str, Any]) -> None:
    """Set columns of an unfinished sweep, and list the request among its decisions."""
    reason = f"{kind} requested by {owner}"
    set_sweep(tx, sweep.number, UNFINISHED_SWEEP, {**values, "reason": reason, "updated_at": now_us()})
    data = json.dumps({"kind": kind, "reason": reason})
    append_decision(tx, sweep.number, now_us(), actor_of(owner), data)


def _absence(sweep_id: str) -> NotFound:
    return NotFound(f"there is no sweep {sweep_id}")


def _sweep_of_key(tx: Connection, owner: str, key: str, fingerprint: str) -> SweepRow | None:
    """The sweep posted with this key. Raises Conflict if it had another body, or is deleted."""
    sweep = sweep_of_key(tx, owner, key)
    if sweep is None:
        return None
    if sweep.state in (SweepState.DELETING, SweepState.DELETED):
        raise Conflict("this Idempotency-Key belongs to a deleted sweep; use a new key for a new sweep")
    if sweep.fingerprint != fingerprint:
        raise Conflict(
            f"this Idempotency-Key belongs to {sweep.id}, which has another body; use a new key for a new sweep"
        )
    return sweep
