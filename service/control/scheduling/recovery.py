"""Recovery of jobs missing from the store, from their storage; running attempts are adopted.

Storage has a job's spec, launches, results, records and checkpoints. It lacks users' later requests, and owners if
services share a root: so recovery launches nothing. A job whose newest attempt has no final result and does not run
is paused.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection

from service.control.jobs.changes import record_new_job, set_state
from service.control.jobs.record_copy import RecordCopy
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import StoredJob, job_folders, read_result, read_stored_job
from service.control.launcher.launcher import Launcher, LauncherUnavailable, Observation
from service.control.report.failure_history import FailureHistory, read_failures
from service.control.report.ingest import Ingest
from service.control.report.saves import CheckpointCommit, Saves
from service.control.report.tokens import hash_token
from service.control.scheduling.gang import Gang
from service.control.scheduling.starter import ACTOR
from service.control.store.clock import now_us, to_us
from service.control.store.database import Database
from service.control.store.deletions import find_deletion
from service.control.store.drafts import find_draft
from service.control.store.jobs import JobRow, get_job, insert_job, is_empty, set_columns
from service.control.store.tracked_runs import insert_tracked_runs
from service.wire.launch import submission_id
from service.wire.segments import WriterFolder
from service.wire.states import ENDED, State

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class RecoveredState:
    """State in which a job is recovered, and the reason."""

    state: State
    reason: str
    is_on_cluster: bool = False
    """Whether the controller must watch an attempt of the job."""
    failure_kind: str | None = None
    """Kind of failure that ended the newest attempt, "" if unknown; None without failure."""


@dataclass
class RecoveryReport:
    """Result of a recovery."""

    jobs: list[tuple[str, str, RecoveredState]] = field(default_factory=list)
    """(id, name, state) of each recovered job."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(storage of a job, or folder, that could not be recovered; reason)."""


class Recovery:
    """Recovers jobs, one per transaction. Repeatable, since stored jobs do not change."""

    def __init__(
        self,
        database: Database,
        roots: StorageRoots,
        launcher: Launcher,
        ingest: Ingest,
        owner: str,
        state_dir: Path,
        recover_sweeps: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """`recover_sweeps` gets the folders of all jobs once these are stored."""
        self._database, self._roots, self._launcher, self._ingest = database, roots, launcher, ingest
        self._owner, self._recover_sweeps = owner, recover_sweeps
        self._recovering_file = state_dir / "recovering"
        self._silent: set[Launcher] = set()
        """Launchers that have not answered in this recovery."""

    def run_if_empty(self) -> None:
        """Recover into an empty store, or continue a recovery. Never raises: a service without its storage still
        accepts jobs."""
        try:
            with self._database.read() as tx:
                empty = is_empty(tx)
            if empty or self._recovering_file.exists():
                report = self.run()
                for job_id, _, recovered_state in report.jobs:
                    log.info("recovered", job=job_id, state=recovered_state.state, reason=recovered_state.reason)
                for storage, reason in report.skipped:
                    log.warning("cannot recover a job", storage=storage, error=reason)
                if report.jobs:
                    log.warning("the store was empty: recovered jobs from storage", jobs=len(report.jobs))
        except OSError as error:
            log.warning("could not recover jobs from storage; retry with 'shardyard recover'", error=str(error))
        except Exception:
            log.exception("could not recover jobs from storage; retry with 'shardyard recover'")

    def run(self, on_recovered: Callable[[str, str, RecoveredState], None] = lambda *_: None) -> RecoveryReport:
        """Recover every job on storage that is not in the store, and pass it to `on_recovered`. Raises OSError for an
        unreadable root."""
        report = RecoveryReport()
        stored_jobs, storages = [], list[str]()
        self._silent.clear()
        for storage in job_folders(
            self._roots, lambda folder, error: report.skipped.append((folder, _first_line(error)))
        ):
            storages.append(storage)
            with self._database.read() as tx:
                if _is_known(tx, storage.rpartition("/")[2]):
                    continue
            try:
                stored_jobs.append(read_stored_job(self._roots, storage))
            except (OSError, ValueError) as error:
                report.skipped.append((storage, _first_line(error)))
        if stored_jobs:
            self._recovering_file.touch()
        for job in sorted(stored_jobs, key=lambda job: (job.created_at, job.id)):
            observation = self._observe(job)
            try:
                if observation is not None and observation.has_ended and job.result is None:
                    # The attempt may have ended after its folder was read.
                    job = replace(job, result=read_result(self._roots.folder(job.storage), job.attempt))
                recovered_state = recover_state(job, observation)
                stored_state = self._restore(job, recovered_state, is_confirmed=observation is not None)
            except (OSError, ValueError) as error:
                report.skipped.append((job.storage, _first_line(error)))
                continue
            if stored_state is not None:
                report.jobs.append((job.id, job.spec.name, stored_state))
                on_recovered(job.id, job.spec.name, stored_state)
        if stored_jobs or self._recovering_file.exists():
            self._recover_sweeps(storages)
        self._recovering_file.unlink(missing_ok=True)
        return report

    def _observe(self, job: StoredJob) -> Observation | None:
        launcher = self._launcher_of(job)
        if job.attempt == 0 or launcher in self._silent:
            return None
        try:
            return launcher.observe(submission_id(job.id, job.attempt))
        except LauncherUnavailable:
            self._silent.add(launcher)  # each further query might also run into its timeout
            return None

    def _launcher_of(self, job: StoredJob) -> Launcher:
        """Launcher of the job's newest attempt."""
        return self._launcher.of_pool(None if job.launch is None else job.launch.pool)

    def _restore(self, job: StoredJob, recovered_state: RecoveredState, *, is_confirmed: bool) -> RecoveredState | None:
        """Store the job with its records; returns the state it was stored in, or None if the store has it by now.
        `is_confirmed`: the cluster was queried about it and answered."""
        storage = self._roots.folder(job.storage)
        started_at: int | None = None
        last_at = to_us(job.created_at)
        values = self._values(job)
        if recovered_state.is_on_cluster and not is_confirmed:
            values["unconfirmed_since"] = now_us()
        # Read before the transaction, which blocks all other writes: storage may be slow.
        with RecordCopy(storage, max(job.attempt, 1)) as copy, self._database.write() as tx:
            if _is_known(tx, job.id):
                return None
            row = insert_job(tx, values, job.spec.labels)
            insert_tracked_runs(tx, row.number, [tracker for tracker, _ in job.spec.track.trackers()])
            record_new_job(tx, row, ACTOR, notifies=False)
            newest: WriterFolder | None = None
            for writer, records in copy.batches():
                if newest is None or writer.attempt != newest.attempt:
                    set_columns(tx, row.number, {"group_phase": None, "group_phase_at": None, "group_reason": None})
                newest = writer
                self._ingest.restore(tx, _reload(tx, job.id), writer.attempt, writer.record_writer, records)
                began = [to_us(record.time) for record in records if record.kind == "started"]
                started_at = min([*began, *([] if started_at is None else [started_at])], default=None)
                last_at = max(last_at, to_us(records[-1].time))
            row = _reload(tx, job.id)
            losses = _losses(job, row)
            recovered_state = _with_losses(job, recovered_state, losses)
            set_columns(
                tx,
                row.number,
                {
                    "started_at": started_at,
                    "updated_at": last_at,
                    "losses": losses.model_dump_json(),
                    "failures": losses.num_failures,
                    **_progress(job, row),
                },
            )
            if not recovered_state.is_on_cluster:
                values = {"result": job.result.model_dump_json()} if job.result else {}
                set_state(
                    tx, _reload(tx, job.id), recovered_state.state, recovered_state.reason, ACTOR, values,
                    notifies=False,
                )  # fmt: skip
                if recovered_state.state in ENDED:
                    set_columns(tx, row.number, {"finished_at": last_at})
        return recovered_state

    def _values(self, job: StoredJob) -> dict[str, Any]:
        """Columns of a job's row from its storage alone."""
        created_at_us = to_us(job.created_at)
        values: dict[str, Any] = {
            "id": job.id,
            "owner": self._owner,
            "name": job.spec.name,
            "spec": job.spec_text,
            "storage": job.storage,
            "state": State.RECOVERING,
            "reason": "recovered from its storage",
            "num_steps": job.spec.train.num_steps,
            "created_at": created_at_us,
            "updated_at": created_at_us,
            "queued_at": created_at_us,
            "attempt": job.attempt,
            "launch": "submitted" if job.attempt else None,
        }
        if job.launch is not None:
            resources, plan = job.launch.spec.resources, job.launch.plan
            gang = Gang(plan.num_workers, resources.cpus_per_worker, job.launch.gpus_per_worker, job.launch.pool)
            values |= {
                "plan": plan.model_dump_json(),
                "gang": json.dumps(gang.to_dict()),
                "token_hash": hash_token(job.launch.token.get_secret_value()),
                "dashboard_url": self._dashboard_url(job),
            }
        return values

    def _dashboard_url(self, job: StoredJob) -> str | None:
        launcher = self._launcher_of(job)
        if launcher in self._silent:
            return None
        try:
            return launcher.dashboard_url(submission_id(job.id, job.attempt))
        except LauncherUnavailable:
            return None


def recover_state(job: StoredJob, observation: Observation | None) -> RecoveredState:
    """State in which to recover a job, from its storage and the observation of its newest attempt, if there is one."""
    resumes = f"from step {job.checkpoint.step}" if job.checkpoint else "from its beginning"
    if job.attempt == 0:
        return RecoveredState(State.PAUSED, "recovered from its storage, without a record of a start; resume it")
    number, result = job.attempt, job.result
    if result is not None and result.outcome != "preempted" and (result.outcome != "failed" or not result.retryable):
        state = State(result.outcome)
        return RecoveredState(
            state, result.message or f"{result.outcome} at step {result.step}; recovered from its storage"
        )
    if observation is None:
        return RecoveredState(State.RECOVERING, "recovered; waiting for its state on the cluster", True)
    if observation.status in ("running", "pending"):
        return RecoveredState(
            State.RECOVERING, f"recovered; attempt {number} is {observation.status} on the cluster", True
        )
    kind: str | None = None
    if result is not None and result.outcome == "preempted":
        ending = f"was preempted at step {result.step}"
    elif result is not None:
        ending, kind = f"failed at step {result.step}", result.failure_kind
    elif observation.status == "stopped":
        ending = "was killed"
    elif observation.has_ended:
        ending, kind = "ended without a result", "driver"
    else:
        ending = "is no longer on the cluster"
    return RecoveredState(
        State.PAUSED,
        f"recovered from its storage; attempt {number} {ending}: 'resume' continues {resumes}",
        failure_kind=kind,
    )


def _with_losses(job: StoredJob, recovered_state: RecoveredState, losses: FailureHistory) -> RecoveredState:
    """The same state, or FAILED if the job's retries are used up."""
    kind, retry = recovered_state.failure_kind, job.spec.retry
    if kind is None or losses.num_left(retry, kind) > 0:
        return recovered_state
    own_limit = retry.own_limit(kind)
    name, limit = ("retry.max_failures", retry.max_failures)
    if own_limit is not None:
        name, limit = f"retry.kinds.{kind}.max_failures", own_limit
    return replace(
        recovered_state, state=State.FAILED, reason=f"{recovered_state.reason}; {name} (={limit}) is exhausted"
    )


def _losses(job: StoredJob, row: JobRow) -> FailureHistory:
    """Failures of the newest attempt, from its records, and of earlier ones, from the retries left at its launch."""
    losses = read_failures(row.losses, row.failures)
    if job.launch is None or losses.progress_at[0] >= job.attempt:
        return losses
    retry, failures_left = job.spec.retry, job.launch.failures_left
    earlier = FailureHistory(
        progress_at=losses.progress_at, num_older=max(0, retry.max_failures - job.launch.max_failures)
    )
    for kind in retry.kinds:
        for _ in range(max(0, (retry.own_limit(kind) or 0) - failures_left.get(kind, retry.own_limit(kind) or 0))):
            earlier = earlier.after_failure((job.attempt, 0), kind)
    return earlier.with_failures_of(losses, job.attempt)


def _progress(job: StoredJob, row: JobRow) -> dict[str, Any]:
    """Columns for a checkpoint on storage that no record mentions."""
    columns: dict[str, Any] = {}
    if job.checkpoint is not None and row.saves is None:
        created_at = job.checkpoint.created_at
        last_commit = CheckpointCommit(
            step=job.checkpoint.step,
            time=datetime.fromisoformat(created_at) if created_at else datetime.now(UTC),
            size_bytes=job.checkpoint.size_bytes,
        )
        columns |= {"saves": Saves(committed=last_commit).model_dump_json(), "step": max(row.step, last_commit.step)}
    return columns


def _is_known(tx: Connection, job_id: str) -> bool:
    """Whether the store has the job, has deleted it, or is storing it."""
    return (
        get_job(tx, job_id) is not None
        or find_deletion(tx, job_id=job_id) is not None
        or find_draft(tx, job_id) is not None
    )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reload(tx: Connection, job_id: str) -> JobRow:
    job = get_job(tx, job_id)
    assert job is not None, "it was stored in this transaction"
    return job
