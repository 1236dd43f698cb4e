"""Jobs put back into a store that lost them, from what lies in their storage; what still runs is adopted.

Storage has a job's spec, each attempt's launch and result, its records and its checkpoints. It does not say what users
asked since the last attempt, nor whose the jobs are where several services share a root: so nothing is launched by
itself. A job whose attempt is neither over nor known to the cluster is paused, and goes on when somebody resumes it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import Connection

from service.control.launcher.launcher import Launcher, LauncherUnavailable, Observation
from service.control.lifecycle.admission import Gang
from service.control.lifecycle.changes import enter, tell_new
from service.control.lifecycle.roots import StorageRoots
from service.control.lifecycle.starter import ACTOR
from service.control.lifecycle.stored_jobs import StoredJob, job_folders, read_stored_job
from service.control.report.catch_up import sealed_records
from service.control.report.ingest import Ingest
from service.control.report.losses import Losses, read_losses
from service.control.report.saves import Committed, Saves
from service.control.report.tokens import hash_token
from service.control.store.clock import to_us
from service.control.store.database import Database
from service.control.store.deletions import find_deletion
from service.control.store.drafts import find_draft
from service.control.store.jobs import JobRow, get_job, insert_job, is_empty, set_columns
from service.wire.launch import submission_id
from service.wire.segments import WriterFolder
from service.wire.states import ENDED, State

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Standing:
    """State that a job is recovered in, and why."""

    state: State
    reason: str
    is_on_cluster: bool = False
    """Whether the controller has to look after an attempt of it."""


@dataclass
class Recovered:
    """Outcome of a recovery."""

    jobs: list[tuple[str, str, Standing]] = field(default_factory=list)
    """Id, name and standing of each job that was put back."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Storage of each that could not be, and why."""


class Recovery:
    """Puts jobs back. Each is one transaction, and one that is there already is left as it is: it may be repeated."""

    def __init__(
        self,
        database: Database,
        roots: StorageRoots,
        launcher: Launcher,
        ingest: Ingest,
        owner: str,
        state_dir: Path,
    ) -> None:
        self._database, self._roots, self._launcher, self._ingest = database, roots, launcher, ingest
        self._owner = owner
        self._unfinished = state_dir / "recovering"

    def run_if_empty(self) -> None:
        """Recovers into a store that holds nothing, or where a recovery was broken off. Never raises: a service whose
        storage cannot be read takes new jobs all the same."""
        try:
            with self._database.read() as tx:
                empty = is_empty(tx)
            if empty or self._unfinished.exists():
                recovered = self.run()
                for job_id, _, standing in recovered.jobs:
                    log.info("recovered", job=job_id, state=standing.state, reason=standing.reason)
                for storage, why in recovered.skipped:
                    log.warning("a job cannot be recovered", storage=storage, error=why)
                if recovered.jobs:
                    log.warning(
                        "the store was empty: jobs were recovered from storage", jobs=len(recovered.jobs)
                    )
        except Exception:
            log.exception("jobs could not be recovered from storage; 'shardyard recover' tries again")

    def run(self, tell: Callable[[str, str, Standing], None] = lambda *_: None) -> Recovered:
        """Recovers every job that storage has and the store has not; `tell` hears of each. Raises OSError."""
        recovered = Recovered()
        stored = []
        for storage in job_folders(self._roots):
            with self._database.read() as tx:
                if _is_known(tx, storage.rpartition("/")[2]):
                    continue
            try:
                stored.append(read_stored_job(self._roots, storage))
            except (OSError, ValueError) as error:
                recovered.skipped.append((storage, str(error).splitlines()[0]))
        if stored:
            self._unfinished.touch()
        for job in sorted(stored, key=lambda job: (job.created_at, job.id)):
            standing = standing_of(job, self._observe(job))
            try:
                new = self._restore(job, standing)
            except (OSError, ValueError) as error:
                recovered.skipped.append((job.storage, str(error).splitlines()[0]))
                continue
            if new:
                recovered.jobs.append((job.id, job.spec.name, standing))
                tell(job.id, job.spec.name, standing)
        self._unfinished.unlink(missing_ok=True)
        return recovered

    def _observe(self, job: StoredJob) -> Observation | None:
        if job.attempt == 0:
            return None
        try:
            return self._launcher.observe(submission_id(job.id, job.attempt))
        except LauncherUnavailable:
            return None

    def _restore(self, job: StoredJob, standing: Standing) -> bool:
        """Store the job, its records and its standing; False where another was quicker."""
        storage = self._roots.folder(job.storage)
        started_at: int | None = None
        last_at = to_us(job.created_at)
        with self._database.write() as tx:
            if _is_known(tx, job.id):
                return False
            row = insert_job(tx, self._values(job), job.spec.labels)
            tell_new(tx, row, ACTOR)
            newest: WriterFolder | None = None
            for writer, records in sealed_records(storage, max(job.attempt, 1), lambda _: 0):
                if newest is None or writer.attempt != newest.attempt:
                    set_columns(
                        tx, row.number, {"group_phase": None, "group_phase_at": None, "group_reason": None}
                    )
                newest = writer
                self._ingest.restore(tx, _again(tx, job.id), writer.attempt, writer.record_writer, records)
                began = [to_us(record.time) for record in records if record.kind == "started"]
                started_at = min([*began, *([] if started_at is None else [started_at])], default=None)
                last_at = max(last_at, to_us(records[-1].time))
            row = _again(tx, job.id)
            set_columns(
                tx, row.number, {"started_at": started_at, "updated_at": last_at, **_progress(job, row)}
            )
            if not standing.is_on_cluster:
                values = {"result": job.result.model_dump_json()} if job.result else {}
                enter(tx, _again(tx, job.id), standing.state, standing.reason, ACTOR, values)
                if standing.state in ENDED:
                    set_columns(tx, row.number, {"finished_at": last_at})
        return True

    def _values(self, job: StoredJob) -> dict[str, Any]:
        """The row of a job of which nothing is known but what lies in its storage."""
        at = to_us(job.created_at)
        values: dict[str, Any] = {
            "id": job.id,
            "owner": self._owner,
            "name": job.spec.name,
            "spec": job.spec_text,
            "storage": job.storage,
            "state": State.RECOVERING,
            "reason": "recovered from its storage",
            "num_steps": job.spec.train.num_steps,
            "created_at": at,
            "updated_at": at,
            "queued_at": at,
            "attempt": job.attempt,
            "launch": "submitted" if job.attempt else None,
        }
        if job.launch is not None:
            resources, plan = job.launch.spec.resources, job.launch.plan
            gang = Gang(plan.num_workers, resources.cpus_per_worker, job.launch.gpus_per_worker)
            values |= {
                "plan": plan.model_dump_json(),
                "gang": json.dumps(gang.to_dict()),
                "token_hash": hash_token(job.launch.token.get_secret_value()),
                "dashboard_url": self._dashboard_url(job),
            }
        return values

    def _dashboard_url(self, job: StoredJob) -> str | None:
        try:
            return self._launcher.dashboard_url(submission_id(job.id, job.attempt))
        except LauncherUnavailable:
            return None


def standing_of(job: StoredJob, seen: Observation | None) -> Standing:
    """Where a job stands, from its storage and from what the cluster says of its newest attempt; None where the cluster
    was not asked or did not answer."""
    resumes = f"from step {job.checkpoint.step}" if job.checkpoint else "from its beginning"
    if job.attempt == 0:
        return Standing(
            State.PAUSED, "recovered from its storage, where nothing says that it ever started; resume it"
        )
    number, result = job.attempt, job.result
    if result is not None and (result.outcome != "failed" or not result.retryable):
        state = State(result.outcome)
        return Standing(
            state, result.message or f"{result.outcome} at step {result.step}; recovered from its storage"
        )
    if seen is None:
        return Standing(State.RECOVERING, "recovered; its cluster has yet to say what became of it", True)
    if seen.status in ("running", "pending") or (seen.ended and seen.status != "stopped"):
        return Standing(
            State.RECOVERING, f"recovered; attempt {number} is {seen.status} on the cluster", True
        )
    what = "was stopped by force" if seen.ended else "is not on the cluster any more"
    return Standing(
        State.PAUSED, f"recovered from its storage; attempt {number} {what}: 'resume' goes on {resumes}"
    )


def _progress(job: StoredJob, row: JobRow) -> dict[str, Any]:
    """Columns that records alone do not say: failures before the newest attempt, and a checkpoint nobody told of."""
    columns: dict[str, Any] = {}
    losses = read_losses(row.losses, row.failures)
    if job.launch is not None and losses.progress_at[0] < job.attempt:
        before = max(0, job.spec.retry.max_failures - job.launch.max_failures)
        since = tuple(moment for moment in losses.failures if moment[0] == job.attempt)
        losses = Losses(progress_at=losses.progress_at, failures=since, num_older=before)
        columns |= {"losses": losses.model_dump_json(), "failures": losses.num_failures}
    if job.checkpoint is not None and row.saves is None:
        at = job.checkpoint.created_at
        committed = Committed(
            step=job.checkpoint.step,
            time=datetime.fromisoformat(at) if at else datetime.now(UTC),
            size_bytes=job.checkpoint.size_bytes,
        )
        columns |= {
            "saves": Saves(committed=committed).model_dump_json(),
            "step": max(row.step, committed.step),
        }
    return columns


def _is_known(tx: Connection, job_id: str) -> bool:
    """Whether the store has the job, or had it, or is about to."""
    return (
        get_job(tx, job_id) is not None
        or find_deletion(tx, job_id=job_id) is not None
        or find_draft(tx, job_id) is not None
    )


def _again(tx: Connection, job_id: str) -> JobRow:
    job = get_job(tx, job_id)
    assert job is not None, "it was stored in this transaction"
    return job
