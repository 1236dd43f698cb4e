"""Deletion of jobs, carried out in small steps by the controller.

The order makes crashes harmless: the request is stored first; then files are removed, then events, and last the row,
by which a restart finds unfinished deletions.
"""

from collections.abc import Callable
from time import monotonic

import structlog

from service.control.errors import Conflict
from service.control.jobs.changes import explain, set_state
from service.control.jobs.lease import Lease, LeaseLost
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import absence
from service.control.report.hub import Hub
from service.control.retention.removal import remove_job_folder, remove_spool
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.deletions import DeletionRow, find_deletion, finish_deletion, insert_deletion
from service.control.store.events import delete_oldest_events
from service.control.store.jobs import JobRow, delete_job, get_job, jobs_in
from service.wire.states import STUCK, State, sources

ACTOR = "controller"
STEP_S = 0.2
"""Time spent on files in one step, while other jobs wait."""
STEP_EVENTS = 5_000
RETRY_INTERVAL_S = 10.0
"""Interval between attempts to remove files."""
log = structlog.get_logger(__name__)


class Deletions:
    """Requests to delete, and their execution."""

    def __init__(
        self,
        database: Database,
        hub: Hub,
        lease: Lease,
        roots: StorageRoots,
        wake: Callable[[], None],
        forget: Callable[[str], None] = lambda job_id: None,
    ) -> None:
        """`wake` starts the controller's next step; `forget` deletes the cluster's objects of a job."""
        self._database, self._hub, self._lease = database, hub, lease
        self._roots, self._wake, self._forget = roots, wake, forget
        self._next_try_at: dict[int, float] = {}

    def ask(self, job_id: str, owner: str) -> tuple[DeletionRow, str]:
        """Store a deletion request (idempotent); returns the deletion and its progress. Raises NotFound, and
        Conflict for a job that may be on the cluster or is to run."""
        actor = f"user:{owner}"
        with self._database.write() as tx:
            job = get_job(tx, job_id, lock=True)
            deletion = find_deletion(tx, job_id=job_id)
            if job is None:
                if deletion is None:
                    raise absence(tx, job_id)
                return deletion, "deleted"
            if deletion is None:
                deletion = self._new(job, actor)
                insert_deletion(tx, deletion)
                reason = f"deletion requested by {owner}; removing its files first"
                events = set_state(tx, job, State.DELETING, reason, actor)
            elif job.reason.startswith(STUCK):
                reason = f"deletion requested again by {owner}"
                events = explain(tx, job, reason, actor)
            else:
                return deletion, job.reason
        log.info("deletion requested", job=job_id, actor=actor, storage=job.storage)
        self._hub.publish(job_id, events)
        self._next_try_at.pop(job.number, None)
        self._wake()
        return deletion, reason

    def _new(self, job: JobRow, actor: str) -> DeletionRow:
        if State(job.state) not in sources(State.DELETING):
            raise Conflict(f"{job.id} is {job.state}; only a finished or paused job can be deleted; cancel it first")
        if self._roots.find(job.storage) is None:
            raise Conflict(
                f"the files of {job.id} are at {job.storage}, outside the storage roots of this "
                "service; its operator can add the root to SHARDYARD_STORAGE_ROOTS again"
            )
        return DeletionRow(job.id, job.number, job.owner, job.name, job.storage, job.attempt, actor, now_us(), None)

    def step(self) -> bool:
        """Do part of the oldest possible deletion; False if none. Raises LeaseLost."""
        with self._database.read() as tx:
            jobs = jobs_in(tx, {State.DELETING})
        for job in jobs:
            if self._next_try_at.get(job.number, 0.0) > monotonic():
                continue
            try:
                self._continue(job)
            except LeaseLost:
                raise
            except Exception as error:
                self._next_try_at[job.number] = monotonic() + RETRY_INTERVAL_S
                log.warning("cannot delete a job; will retry", job=job.id, error=str(error))
                with self._lease.change(job) as (tx, events):
                    events += explain(tx, job, f"{STUCK}{error}; will retry", ACTOR)
                continue
            return True
        return False

    def _continue(self, job: JobRow) -> None:
        self._lease.require()
        self._forget(job.id)
        until = monotonic() + STEP_S
        is_removed = remove_job_folder(self._roots, job.storage, until) and remove_spool(job.id, until)
        if not is_removed:
            return
        with self._lease.change(job) as (tx, _):
            if delete_oldest_events(tx, job.number, STEP_EVENTS):
                return
            delete_job(tx, job.number)
            finish_deletion(tx, job.id, now_us())
        self._next_try_at.pop(job.number, None)
        log.info("deleted", job=job.id)
