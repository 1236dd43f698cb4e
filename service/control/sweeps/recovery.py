"""Recovery of sweeps whose jobs were recovered from storage.

A recovered sweep is paused: storage lacks users' later requests, so nothing is launched before somebody resumes it.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from sqlalchemy import Connection

from moe.spec.sweep import SweepSpec
from service.control.jobs.changes import set_state
from service.control.jobs.roots import StorageRoots
from service.control.scheduling.new_jobs import digest_of
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import JobRow, get_job, set_columns
from service.control.store.sweeps import append_decision, get_sweep, insert_sweep
from service.control.sweeps.member_file import MemberFile, read_member_file
from service.control.sweeps.policy import num_continuing
from service.control.sweeps.results import last_value
from service.control.sweeps.states import SweepState
from service.wire.states import OVER, State

ACTOR = "recovery"
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Progress:
    """A recovered member: how far it has trained, and its last value of the metric."""

    number: int
    step: int
    value: float | None


def restored_rungs(
    members: Sequence[Progress], rungs: Sequence[int], factor: int, mode: Literal["min", "max"]
) -> dict[int, tuple[int, bool]]:
    """(number of rungs survived, whether it was stopped at the next one) by number of the member.

    The choice at a rung was made if a member has trained beyond it. Such members have survived the rung, and so have
    the best members at it, up to the number that continues from it.
    """
    standings, entrants = {member.number: (0, False) for member in members}, list(members)
    for index, rung_step in enumerate(rungs):
        members_beyond = [member for member in entrants if member.step > rung_step]
        if not members_beyond:
            break
        members_at_rung = sorted(
            (member for member in entrants if member.step == rung_step and member.value is not None),
            key=lambda member: (_rank(member, mode), member.number),
        )
        num_more = max(0, num_continuing(len(entrants), factor) - len(members_beyond))
        survivors = [*members_beyond, *members_at_rung[:num_more]]
        for member in entrants:
            standings[member.number] = (index + 1, False) if member in survivors else (index, True)
        entrants = survivors
    return standings


def _rank(member: Progress, mode: Literal["min", "max"]) -> float:
    value = member.value or 0.0
    return value if mode == "min" else -value


class SweepRecovery:
    """Recovers sweeps, one per transaction. Repeatable, since stored sweeps do not change."""

    def __init__(self, database: Database, roots: StorageRoots, owner: str) -> None:
        self._database, self._roots, self._owner = database, roots, owner

    def run(self, storages: Sequence[str]) -> None:
        """Recover the sweeps of jobs in these folders. A job whose folder is unreadable becomes a single job."""
        members: defaultdict[str, list[tuple[str, MemberFile]]] = defaultdict(list)
        for storage in storages:
            try:
                file = read_member_file(self._roots.folder(storage))
            except OSError as error:
                log.warning("cannot read whether a job is of a sweep", storage=storage, error=str(error))
                continue
            if file is not None:
                members[file.sweep_id].append((storage.rpartition("/")[2], file))
        for sweep_id, entries in sorted(members.items()):
            try:
                self._restore(sweep_id, sorted(entries, key=lambda entry: entry[1].number))
            except ValueError as error:
                log.warning("cannot recover a sweep; its jobs are single ones", sweep=sweep_id, error=str(error))

    def _restore(self, sweep_id: str, entries: Sequence[tuple[str, MemberFile]]) -> None:
        sweep = entries[0][1]
        spec = SweepSpec.model_validate(sweep.body["sweep"])
        with self._database.write() as tx:
            if get_sweep(tx, sweep_id) is not None:
                return
            jobs = {file.number: job for job_id, file in entries if (job := get_job(tx, job_id)) is not None}
            files = {file.number: file for _, file in entries if file.number in jobs}
            if not jobs:
                return
            progress = [self._progress(tx, number, job, sweep.metric) for number, job in jobs.items()]
            standings = restored_rungs(progress, sweep.rungs, spec.halving_factor, spec.mode)
            rows = [
                {"number": number, "job_id": job.id, "job_number": job.number,
                 "field_values": json.dumps(files[number].values), "rung": standings[number][0],
                 "is_out": int(standings[number][1])}
                for number, job in jobs.items()
            ]  # fmt: skip
            for number, job in jobs.items():
                self._set_job(tx, job, sweep.rungs, *standings[number])
            is_over = all(job.state in OVER or standings[number][1] for number, job in jobs.items())
            reason = f"recovered from the storage of {len(jobs)} jobs" + ("" if is_over else "; resume it to go on")
            row = insert_sweep(
                tx,
                {"id": sweep_id, "owner": self._owner, "name": sweep.sweep_name, "body": json.dumps(sweep.body),
                 "metric": sweep.metric, "rungs": json.dumps(sweep.rungs),
                 "state": SweepState.RUNNING if is_over else SweepState.PAUSED, "reason": reason,
                 "created_at": sweep.created_at_us, "updated_at": now_us(), "fingerprint": digest_of(sweep.body)},
                rows,
            )  # fmt: skip
            append_decision(tx, row.number, now_us(), ACTOR, json.dumps({"kind": "recover", "reason": reason}))
        log.info("recovered a sweep", sweep=sweep_id, num_jobs=len(jobs))

    def _progress(self, tx: Connection, number: int, job: JobRow, metric: str) -> Progress:
        value = last_value(tx, job.number, metric)
        return Progress(number, job.step, None if value is None else value.value)

    def _set_job(self, tx: Connection, job: JobRow, rungs: Sequence[int], rung: int, is_out: bool) -> None:
        if is_out and job.state == State.PAUSED:
            reason = f"stopped at rung {rung + 1} of its sweep, at step {rungs[rung]}; its checkpoint is kept"
            set_state(tx, job, State.CANCELLED, reason, ACTOR, notifies=False)
        elif not is_out and job.state not in OVER and rung < len(rungs):
            set_columns(tx, job.number, {"pause_at": rungs[rung]})
