"""Users' requests for jobs: submit, cancel, pause, resume. Each answer is durable."""

import base64
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, Literal

import structlog
from sqlalchemy import Connection

from moe.interchange.expand import expand_request, names_folder
from moe.spec import JobSpec
from service.control.errors import Conflict, Unavailable
from service.control.jobs.changes import explain, set_state
from service.control.jobs.data_roots import DataRoots
from service.control.jobs.earlier_releases import is_of_module
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import describe_deletion, find_job
from service.control.report.checkpoints import list_checkpoints
from service.control.report.event_text import WireEvent
from service.control.report.hub import Hub
from service.control.retention.full_roots import FullRoots
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.job_plans import JobPlans
from service.control.scheduling.keyed_lock import KeyedLock
from service.control.scheduling.module_plans import ModulePlans
from service.control.scheduling.new_jobs import NewJobs, digest_of
from service.control.scheduling.warm_starts import WarmStarts
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.deletions import find_deletion
from service.control.store.idempotency import UsedKey, find_key, use_key
from service.control.store.jobs import JobRow, ends_of_queue, get_by_number
from service.control.uploads.names import names_upload, replace_uploads
from service.control.uploads.uploads import Uploads
from service.tracker.places import TrackerPlaces
from service.wire.states import ENDED, RESUMABLE, WAITS, State

QueueEnd = Literal["first", "last"]
"""End of the queue to which a job can be moved."""
log = structlog.get_logger(__name__)


class Requests:
    """Handles users' requests. `wake` starts the controller's next step."""

    def __init__(
        self,
        database: Database,
        hub: Hub,
        watch: ClusterWatch,
        storage_roots: StorageRoots,
        data_roots: DataRoots,
        wake: Callable[[], None],
        *,
        allowed_code: tuple[str, ...],
        modules: ModulePlans,
        trackers: TrackerPlaces,
        uploads: Uploads,
    ) -> None:
        self._database, self._hub, self._wake = database, hub, wake
        self._storage_roots, self._data_roots, self.uploads = storage_roots, data_roots, uploads
        self.plans = JobPlans(
            watch, storage_roots, data_roots, allowed_code=allowed_code, modules=modules, trackers=trackers
        )
        self.full_roots = FullRoots(storage_roots)
        self._warm_starts = WarmStarts(database, storage_roots, self.full_roots, lambda: hub.is_closed)
        self.new_jobs = NewJobs(database, storage_roots, self.plans, self.full_roots, self._warm_starts, uploads)
        self._key_locks = KeyedLock()

    def expand(self, body: Any) -> Any:
        """Complete a posted job or plan request from the folder of its `model.from`, and replace `upload://` by the
        locations of the files. Raises SpecError, Unavailable."""
        body = replace_uploads(body, self.uploads)
        return expand_request(body, self._data_roots.of_text(json.dumps(body, ensure_ascii=False)))

    def post(self, body: Any, owner: str, key: str | None = None) -> tuple[JobRow, bool]:
        """Submit the job of a request body. A body that names a model's folder or an upload is identified by a digest
        of the body, since the folder may change and the upload may be removed."""
        if not must_expand(body):
            return self.submit(JobSpec.parse(body), owner, key)
        request_digest = digest_of(body)
        if key is not None and (previous_job := self._find_job_of_key(owner, key, request_digest)) is not None:
            return previous_job, False
        return self.submit(JobSpec.parse(self.expand(body)), owner, key, request_digest)

    def submit(
        self, spec: JobSpec, owner: str, key: str | None = None, digest: str | None = None
    ) -> tuple[JobRow, bool]:
        """Store a job; return it and whether it is new. The same `key` and spec give the same job, even while the first
        request is processed. `digest` identifies the request in place of a digest of the spec.

        On return, a checkpoint to start from has been copied. Raises SpecError for a job that could not run anywhere,
        Conflict for a key used with another spec, Full, Unavailable, after removing the job's folder.
        """
        spec_text = spec.model_dump_json()
        fingerprint = digest or hashlib.sha256(spec_text.encode()).hexdigest()
        # Copying takes long enough for clients to retry. Requests without a copy are not serialized.
        with nullcontext() if key is None or spec.start_from is None else self._key_locks.acquire((owner, key)):
            if key is not None and (previous_job := self._find_job_of_key(owner, key, fingerprint)) is not None:
                return previous_job, False
            return self._submit(spec, fingerprint, owner, key)

    def _submit(self, spec: JobSpec, fingerprint: str, owner: str, key: str | None) -> tuple[JobRow, bool]:
        checked_job = self.new_jobs.check(spec, new_job_id(), owner)
        with self.new_jobs.draft(checked_job) as draft:
            with self._database.write() as tx:
                # Checked again inside the transaction: two posts with one key may run concurrently.
                if key is not None and (used_key := find_key(tx, owner, key)) is not None:
                    return _job_of_key(tx, used_key, fingerprint), False
                job, events = self.new_jobs.store(tx, draft, actor_of(owner))
                if key is not None:
                    use_key(tx, owner, key, fingerprint, job.number, now_us())
            draft.is_stored = True
        self._publish(job.id, events)
        return job, True

    def cancel(self, job_id: str, owner: str) -> JobRow:
        """Request the job's end. Raises NotFound, Gone, Conflict if it has already ended."""
        with self._database.write() as tx:
            job = find_job(tx, job_id, lock=True)
            if (state := State(job.state)) in ENDED:
                raise Conflict(f"{job_id} has {_past_participle(state)}; only an unfinished job can be cancelled")
            events = cancel_job(tx, job, owner, actor_of(owner))
            job = find_job(tx, job_id)
        self._publish(job_id, events)
        return job

    def pause(self, job_id: str, owner: str) -> JobRow:
        """Request a checkpoint and the release of the workers. Raises NotFound, Gone, Conflict."""
        with self._database.write() as tx:
            job = find_job(tx, job_id, lock=True)
            state = State(job.state)
            if state in ENDED:
                raise Conflict(f"{job_id} has {_past_participle(state)}; only an unfinished job can be paused")
            if job.request == "cancel":
                raise Conflict(f"{job_id} is being cancelled and can no longer be paused")
            if state in (State.PAUSING, State.PAUSED):
                return job
            events = pause_job(tx, job, owner, actor_of(owner))
            job = find_job(tx, job_id)
        self._publish(job_id, events)
        return job

    def resume(self, job_id: str, owner: str) -> JobRow:
        """Queue a paused, failed or cancelled job again. Raises NotFound, Gone, Conflict (also without a checkpoint
        after a failure or cancel), Unavailable."""
        with self._database.read() as tx:
            job = find_job(tx, job_id)
        if job.state in ENDED & RESUMABLE:
            self._require_checkpoint(job)  # outside the transaction, since storage may be slow
        with self._database.write() as tx:
            previous, job = job, find_job(tx, job_id, lock=True)
            state = State(job.state)
            if state not in RESUMABLE:
                status = f"has {_past_participle(state)}" if state in ENDED else f"is {state}"
                wait = "; wait until it is paused" if state == State.PAUSING else ""
                raise Conflict(f"{job_id} {status}; only a paused, failed or cancelled job can be resumed{wait}")
            if state != previous.state:
                raise Conflict(f"{job_id} has just become {state}; repeat the request")
            self.uploads.require_present(tx, job.spec)
            events = resume_job(tx, job, owner, actor_of(owner))
            job = find_job(tx, job_id)
        self._publish(job_id, events)
        return job

    def move(self, job_id: str, owner: str, end: QueueEnd) -> JobRow:
        """Move a queued job to the front or end of the queue. Raises NotFound, Gone, Conflict."""
        with self._database.write() as tx:
            job = find_job(tx, job_id, lock=True)
            if job.state != State.QUEUED:
                raise Conflict(f"{job_id} is {job.state}; only a queued job can be moved in the queue")
            if job.held:
                raise Conflict(f"{job_id} is not in the queue yet: its sweep starts it later; raise sweep.max_parallel")
            ends = ends_of_queue(tx, State.QUEUED)
            assert ends is not None, "this one is in it"
            queued_at = ends[0] - 1 if end == "first" else ends[1] + 1
            reason = f"moved to the {'front' if end == 'first' else 'end'} of the queue by {owner}; {WAITS}"
            events = explain(tx, job, reason, actor_of(owner), {"queued_at": queued_at})
            job = find_job(tx, job_id)
        self._publish(job_id, events)
        return job

    def _find_job_of_key(self, owner: str, key: str, fingerprint: str) -> JobRow | None:
        with self._database.read() as tx:
            used_key = find_key(tx, owner, key)
            return None if used_key is None else _job_of_key(tx, used_key, fingerprint)

    def _require_checkpoint(self, job: JobRow) -> None:
        """Raises Conflict if the job has no usable checkpoint, Unavailable."""
        try:
            checkpoints = list_checkpoints(self._storage_roots.folder(job.storage))
        except OSError as error:
            raise Unavailable(f"cannot read the storage of {job.id}: {error}; try again later") from None
        if all(checkpoint.fault for checkpoint in checkpoints):
            raise Conflict(
                f"{job.id} has {_past_participle(State(job.state))} without a committed checkpoint to resume "
                f"from; submit its spec again ('shardyard submit --like {job.id}') to start from scratch"
            )

    def _publish(self, job_id: str, events: list[WireEvent]) -> None:
        self._hub.publish(job_id, events)
        self._wake()


def must_expand(body: Any) -> bool:
    """Whether a posted job must be expanded before it is a spec, since it names a model's folder or an upload."""
    return names_folder(body) or names_upload(body)


def new_job_id(prefix: str = "job") -> str:
    """New id of 60 random bits, valid in file names, URLs and cluster ids."""
    return f"{prefix}-" + base64.b32encode(secrets.token_bytes(10)).decode().lower()[:12]


def actor_of(owner: str) -> str:
    """Actor of a user's request, as events have it."""
    return f"user:{owner}"


def cancel_job(tx: Connection, job: JobRow, requester: str, actor: str) -> list[WireEvent]:
    """End a job that has not ended: at once if it holds no resources, else by a request to its run."""
    if job.state in (State.QUEUED, State.PAUSED):
        return set_state(tx, job, State.CANCELLED, f"cancelled by {requester}", actor)
    if job.request == "cancel":
        return []
    values = {"request": "cancel", "requested_at": now_us()}
    return explain(tx, job, f"cancel requested by {requester}; ends at the next step", actor, values)


def pause_job(tx: Connection, job: JobRow, requester: str, actor: str) -> list[WireEvent]:
    """Pause a job that is queued or runs: at once if it holds no resources, else by a request to its run."""
    if job.state == State.QUEUED:
        return set_state(tx, job, State.PAUSED, f"paused by {requester} in the queue", actor)
    values = {"request": "pause", "requested_at": now_us()}
    reason = f"pause requested by {requester}; commits a checkpoint at the next step"
    return set_state(tx, job, State.PAUSING, reason, actor, values)


def resume_job(
    tx: Connection, job: JobRow, requester: str, actor: str, values: Mapping[str, Any] = MappingProxyType({})
) -> list[WireEvent]:
    """Queue a paused or ended job again; `values` are further columns to set."""
    # Failures count per run, and this run is over.
    columns = {"queued_at": now_us(), "unfit_for": None, "failures": 0, "losses": None, **values}
    if is_of_module(job.spec):
        columns["plan"] = None  # its code may have changed: plan it again
    return set_state(tx, job, State.QUEUED, f"resumed by {requester}; {WAITS}", actor, columns)


def _past_participle(state: State) -> str:
    return {State.SUCCEEDED: "succeeded", State.FAILED: "failed", State.CANCELLED: "been cancelled"}[state]


def _job_of_key(tx: Connection, used_key: UsedKey, fingerprint: str) -> JobRow:
    """Job of a used key. Raises Conflict if the key was used for another spec, or the job was deleted."""
    job = get_by_number(tx, used_key.job_number)
    if job is None or job.state == State.DELETING:
        deletion = find_deletion(tx, job_number=used_key.job_number)
        assert deletion is not None, "a job went without a record of it"
        raise Conflict(
            f"this Idempotency-Key belongs to a deleted job: {describe_deletion(deletion)}; use a new key for a new job"
        )
    if used_key.fingerprint != fingerprint:
        raise Conflict(f"this Idempotency-Key belongs to {job.id}, which has another spec; use a new key for a new job")
    return job
