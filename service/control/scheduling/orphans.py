"""Orphans: attempts on the cluster that ended, or whose job was deleted, while no control plane watched."""

from collections.abc import Callable
from time import monotonic
from typing import Literal

import structlog

from service.control.jobs.lease import Lease
from service.control.launcher.launcher import Launcher, LauncherUnavailable, Submission
from service.control.scheduling.deduplicator import Deduplicator
from service.control.store.database import Database
from service.control.store.deletions import find_deletion
from service.control.store.jobs import JobRow, get_job
from service.wire.launch import parse_submission_id
from service.wire.states import ACTIVE, State

INTERVAL_S = 30.0
"""Interval between checks of all attempts on the cluster."""
log = structlog.get_logger(__name__)

Action = Literal["leave", "stop", "forget"]


def action_on(submission: Submission, attempt: int, job: JobRow | None, *, is_deleted: bool) -> Action:
    """Decide what to do with an attempt on the cluster. It is left alone if it may be live: if the store does not know
    its job, or has only older attempts of it, as after an older backup was restored."""
    if job is None:
        return "forget" if is_deleted else "leave"
    is_over = attempt < job.attempt or (
        attempt == job.attempt and (State(job.state) not in ACTIVE or job.launch is None)
    )
    return "stop" if is_over and not submission.has_ended else "leave"


class Orphans:
    """A chore of the controller that ends orphans of this installation, with all that they own."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        launcher: Launcher,
        instance: str,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._database, self._lease, self._launcher = database, lease, launcher
        self._instance, self._clock = instance, clock
        self._next_at = -float("inf")
        self._deduplicator = Deduplicator()

    def step(self) -> bool:
        """Check all attempts if a check is due, and end the orphans; False if there were none. Raises LeaseLost."""
        if self._clock() < self._next_at:
            return False
        self._next_at = self._clock() + INTERVAL_S
        found_orphans = False
        for launcher in self._launcher.by_kind().values():
            try:
                submissions = launcher.submissions(self._instance)
            except LauncherUnavailable:
                continue  # the next check may reach it; the reasons of its jobs say that it is unreachable
            for submission in submissions:
                try:
                    found_orphans |= self._end(launcher, submission)
                except LauncherUnavailable as error:
                    log.warning("cannot end an orphan; will retry", submission=submission.submission_id,
                                error=str(error))  # fmt: skip
                    if not error.is_of_one_request:
                        break
        return found_orphans

    def _end(self, launcher: Launcher, submission: Submission) -> bool:
        if (parts := parse_submission_id(submission.submission_id)) is None:
            return False
        job_id, attempt = parts
        with self._database.read() as tx:
            job = get_job(tx, job_id)
            is_deleted = job is None and find_deletion(tx, job_id=job_id) is not None
        action = action_on(submission, attempt, job, is_deleted=is_deleted)
        if action == "leave":
            if job is None and self._deduplicator.is_new(job_id, True):
                log.warning("an attempt of an unknown job is on the cluster; 'shardyard recover' adds the job",
                            job=job_id, attempt=attempt)  # fmt: skip
            return False
        self._lease.require()
        log.warning("ending an orphan", job=job_id, attempt=attempt, job_state=job.state if job else "deleted")
        if action == "stop":
            launcher.stop(submission.submission_id)
        else:
            launcher.forget_job(job_id)
        return True
