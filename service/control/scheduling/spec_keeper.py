"""Restores specs that were removed from storage while their job runs."""

import json
import threading
from collections import deque
from time import monotonic

import structlog

from service.control.jobs.changes import warn
from service.control.jobs.lease import Lease
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import SPEC
from service.control.report.saves import read_saves
from service.control.scheduling.starter import ACTOR
from service.control.store.database import Database
from service.control.store.jobs import JobRow, jobs_in
from service.wire.states import ACTIVE

CHECK_INTERVAL_S = 10.0
"""Interval between the checks of two jobs; on remote storage, a check is a request."""
log = structlog.get_logger(__name__)


class SpecKeeper:
    """Checks active jobs' storage in turn, in its own thread: storage may hang."""

    def __init__(self, database: Database, lease: Lease, roots: StorageRoots) -> None:
        self._database, self._lease, self._roots = database, lease, roots
        self._check_at = 0.0
        self._last_number = 0
        self._checking: threading.Thread | None = None
        self._restore_queue = deque[JobRow]()

    def step(self) -> bool:
        """Report a restored spec (True), or start a check if due. Raises LeaseLost."""
        if self._restore_queue:
            job = self._restore_queue.popleft()
            with self._lease.change(job) as (tx, events):
                events += warn(tx, job, [_warning(job)], ACTOR)
            return True
        if monotonic() < self._check_at or (self._checking is not None and self._checking.is_alive()):
            return False
        self._check_at = monotonic() + CHECK_INTERVAL_S
        with self._database.read() as tx:
            jobs = [job for job in jobs_in(tx, ACTIVE) if job.launch == "submitted"]
        if jobs:
            job = next((job for job in jobs if job.number > self._last_number), jobs[0])
            self._last_number = job.number
            self._checking = threading.Thread(target=self._check, args=(job,), name="spec-keeper", daemon=True)
            self._checking.start()
        return False

    def _check(self, job: JobRow) -> None:
        try:
            folder = self._roots.folder(job.storage)
            if SPEC in folder.sizes():
                return
            folder.make()
            folder.write(SPEC, json.dumps(json.loads(job.spec), indent=2).encode())
        except OSError as error:
            log.warning("cannot check a job's storage", job=job.id, error=str(error))
            return
        log.warning("a job's spec was removed from its storage; writing it again", job=job.id)
        self._restore_queue.append(job)


def _warning(job: JobRow) -> str:
    message = f"files of {job.storage} were removed while it ran; its spec is restored, others are lost"
    commit = read_saves(job.saves).committed
    if commit is None:
        return message
    return f"{message}. If the checkpoint of step {commit.step} is gone, too, no attempt can resume from it"
