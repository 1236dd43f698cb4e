"""Retention of old jobs' events, for ever or for some days after a job's end, and of drafts."""

from time import monotonic

import structlog

from service.control.jobs.lease import Lease
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.events import delete_events_of
from service.control.store.jobs import JobRow, change_job, next_to_thin
from service.wire.states import ENDED

STEP_EVENTS = 5_000
LOOK_S = 60.0
"""Interval between searches for jobs that have become old."""
THINNED = ("log", "plan", "state")
"""Kinds of events that are deleted, in this order."""
_DAY_US = 24 * 3600 * 1_000_000
log = structlog.get_logger(__name__)


class Retention:
    """Thins the events of jobs that ended `keep_days` ago, a little per controller step. First the start of streams
    is moved, then rows are deleted, so that no stream has a gap; the last event, with the job's end, is kept."""

    def __init__(self, database: Database, lease: Lease, keep_days: float | None) -> None:
        self._database, self._lease, self._keep_days = database, lease, keep_days
        self._look_at = 0.0

    def step(self) -> bool:
        """Run one bounded transaction; False if none is due. Raises LeaseLost."""
        if self._keep_days is None or monotonic() < self._look_at:
            return False
        with self._database.read() as tx:
            job = next_to_thin(tx, ENDED, now_us() - int(self._keep_days * _DAY_US))
        if job is None:
            self._look_at = monotonic() + LOOK_S
            return False
        self._thin(job)
        return True

    def _thin(self, job: JobRow) -> None:
        with self._lease.change(job) as (tx, _):
            if job.first_event_id < job.last_event_id:
                # Only for ended jobs: a job resumed meanwhile keeps all its events.
                change_job(tx, job.number, ENDED, {"first_event_id": job.last_event_id})
            elif not any(delete_events_of(tx, job.number, kind, job.first_event_id, STEP_EVENTS) for kind in THINNED):
                change_job(tx, job.number, ENDED, {"thinned_to": job.first_event_id - 1})
                log.info("thinned the events of an old job", job=job.id, kept_from=job.first_event_id)
