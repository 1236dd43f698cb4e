"""Users' requests for sweeps: post, cancel, delete. Each answer is durable."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sqlalchemy import Connection

from moe.spec.sweep import SweepRequest
from service.control.errors import Conflict, Gone, NotFound
from service.control.report.event_text import WireEvent
from service.control.report.hub import Hub
from service.control.scheduling.job_plans import PlanForecast
from service.control.scheduling.new_jobs import digest_of
from service.control.scheduling.requests import Requests, actor_of, must_expand, new_job_id
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.sweeps import (
    SweepRow,
    append_decision,
    get_sweep,
    insert_sweep,
    members_of,
    set_sweep,
    sweep_of_key,
)
from service.control.sweeps.states import ENDED_SWEEP, SweepState
from service.wire.states import ENDED, State

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
        for job_id, job_events in events.items():
            self._hub.publish(job_id, job_events)
        self._wake()
        return sweep, True

    def cancel(self, sweep_id: str, owner: str) -> SweepRow:
        """Request the end of all members that have not ended. Raises NotFound, Gone, Conflict."""
        with self._database.write() as tx:
            sweep = find_sweep(tx, sweep_id, lock=True)
            if sweep.state != SweepState.RUNNING:
                raise Conflict(f"{sweep_id} has ended ({sweep.state}); only a running sweep can be cancelled")
            if sweep.request is None:
                reason = f"cancel requested by {owner}"
                values = {"request": "cancel", "reason": reason, "updated_at": now_us()}
                set_sweep(tx, sweep.number, {SweepState.RUNNING}, values)
                data = json.dumps({"kind": "cancel", "reason": reason})
                append_decision(tx, sweep.number, now_us(), actor_of(owner), data)
            sweep = find_sweep(tx, sweep_id)
        self._wake()
        return sweep

    def delete(self, sweep_id: str, owner: str) -> SweepRow:
        """Request the deletion of an ended sweep with all its jobs (idempotent). Raises NotFound, and Conflict for a
        sweep that runs, or of which a job may run."""
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
            elif sweep.state == SweepState.RUNNING:
                raise Conflict(f"{sweep_id} is running; only a sweep that has ended can be deleted; cancel it first")
            sweep = get_sweep(tx, sweep_id) or sweep
        self._wake()
        return sweep

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
