"""Follows jobs with trackers, and feeds the tracker process from the store.

The store has every record, once and in order, also while a tracker or its process is down. So only confirmed events
count as written, and training is never affected.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from service.control.errors import ServiceError
from service.control.jobs.changes import warn
from service.control.jobs.earlier_releases import read_stored_spec
from service.control.jobs.lease import Lease, LeaseLost
from service.control.report.run_status import RunStatuses
from service.control.store.database import Database
from service.control.store.jobs import JobRow, get_by_number
from service.control.store.tracked_runs import change_tracked_run, first_metric_after, steps_after, unwritten_runs
from service.control.tracking.followed_run import FollowedRun
from service.control.tracking.tracker_processes import TrackerProcesses
from service.control.tracking.unsent import read_unsent
from service.tracker.messages import TrackerOrder, TrackerReply
from service.tracker.places import TrackerPlaces
from service.wire.states import ENDED, State

STORE_INTERVAL_S = 2.0
ACTOR = "tracking"
log = structlog.get_logger(__name__)


class Tracking:
    """Runs in one thread, while this control plane holds the lease."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        statuses: RunStatuses,
        places: TrackerPlaces,
        *,
        interval_s: float,
        patience_s: float,
    ) -> None:
        self._database, self._lease, self._statuses = database, lease, statuses
        self._places, self._interval_s, self._patience_s = places, interval_s, patience_s
        self._runs: dict[tuple[int, str], FollowedRun] = {}
        self._processes = TrackerProcesses()
        self._store_at = 0.0
        self._stop = threading.Event()
        self._began_at = time.time()

    def run(self) -> None:
        """Follow jobs until `stop`."""
        previous_failure = ""
        while not self._stop.wait(self._interval_s):
            failure = ""
            try:
                has_sent = True
                while has_sent and not self._stop.is_set():
                    has_sent = self.step()
            except (ServiceError, LeaseLost) as refusal:
                failure = str(refusal)
                if failure != previous_failure:
                    log.error("tracking failed; will retry", why=failure)
            except Exception as error:
                failure = repr(error)
                if failure != previous_failure:
                    log.exception("tracking failed; will retry")
            previous_failure = failure
        self._end_processes()

    def stop(self) -> None:
        """Make `run` return; callable from any thread."""
        self._stop.set()

    def step(self) -> bool:
        """Process replies, and send events within the window; return whether any were sent."""
        if not self._lease.is_held:
            self._end_processes()
            self._runs.clear()
            return False
        self._take_replies()
        self._look_after_processes()
        self._follow_new()
        has_sent = False
        for run in list(self._runs.values()):
            has_sent |= self._feed(run)
            self._look_after(run)
        self._store_progress()
        return has_sent

    def _follow_new(self) -> None:
        with self._database.read() as tx:
            rows = unwritten_runs(tx)
            new_rows = [row for row in rows if (row.job_number, row.tracker) not in self._runs]
            jobs = {row.job_number: get_by_number(tx, row.job_number) for row in new_rows}
        for row in new_rows:
            if (job := jobs[row.job_number]) is not None and job.state != State.DELETING:
                with suppress(ValueError):  # a spec that this release cannot read
                    spec = read_stored_spec(job.spec)
                    self._runs[row.job_number, row.tracker] = FollowedRun.of_row(row, job.id, spec)

    def _feed(self, run: FollowedRun) -> bool:
        if run.is_full or (run.has_sent_open and not run.is_open):
            return False
        with self._database.read() as tx:
            page = read_unsent(tx, run.row.job_number, run.spec, run.sent_to, run.waits_for_checkpoint)
            job = get_by_number(tx, run.row.job_number) if page is not None else None
        if page is None or job is None:
            return False
        if not run.is_open and not page.steps and (page.end is None or not job.step):
            # Nothing to show yet: a queued job, or one that never trained.
            run.sent_to = page.through
            if not run.has_sent_open:
                run.written_to = run.sent_to
            return False
        if not run.is_open:
            if time.monotonic() < run.retry_at:
                return False
            order = TrackerOrder(job_id=run.job_id, tracker=run.tracker, open=run.facts(self._places))
            run.has_sent_open, run.since = self._processes.tell(order), time.monotonic()
            return False
        if not run.has_unconfirmed:
            run.since = time.monotonic()
        order = TrackerOrder(
            job_id=run.job_id, tracker=run.tracker, steps=page.steps, through=page.through, end=page.end,
            system=self._statuses.device_use(run.job_id, job.attempt) if page.steps else {},
            waiting=page.state in (State.QUEUED, State.PAUSED),
        )  # fmt: skip
        self._processes.tell(order)
        run.sent_to = page.through
        return bool(page.steps)

    def _take_replies(self) -> None:
        runs = {(run.job_id, run.tracker): run for run in self._runs.values()}
        for reply in self._processes.replies():
            if (run := runs.get((reply.job_id, reply.tracker))) is not None:
                self._take(run, reply)

    def _take(self, run: FollowedRun, reply: TrackerReply) -> None:
        run.since = time.monotonic()
        match reply.kind:
            case "opened":
                run.is_open = True
                with self._database.read() as tx:
                    first_id = first_metric_after(tx, run.row.job_number, reply.last_step or 0)
                # Events that a killed process had not handed over are sent again.
                if first_id is not None:
                    run.sent_to = run.written_to = min(run.written_to, first_id - 1)
                with self._database.write() as tx:
                    change_tracked_run(tx, run.row, place=reply.place)
            case "written":
                run.confirm(reply.through)
                if run.trouble:
                    self._note_restored(run)
            case "trouble":
                run.delay_retry()
                if run.is_open:
                    run.begin_again()
                self._note_trouble(run, reply.words)
            case "note":
                self._warn(run, f"{run.tracker}: {reply.words}")

    def _note_trouble(self, run: FollowedRun, trouble: str) -> None:
        if run.trouble == trouble:
            return
        if not run.trouble:
            self._warn(run, f"cannot write to {run.tracker}: {trouble}; will retry, and records wait in the store")
        run.trouble = trouble
        with self._database.write() as tx:
            change_tracked_run(tx, run.row, trouble=trouble)

    def _note_restored(self, run: FollowedRun) -> None:
        self._warn(run, f"{run.tracker} can be written again")
        run.trouble = ""
        with self._database.write() as tx:
            change_tracked_run(tx, run.row, trouble=None)

    def _look_after(self, run: FollowedRun) -> None:
        """Report a tracker that hangs; forget runs that are complete, given up, or of deleted jobs."""
        if run.hangs():
            self._note_trouble(run, "it does not respond")
        with self._database.read() as tx:
            job = get_by_number(tx, run.row.job_number)
        if job is None or job.state == State.DELETING:
            self._forget(run)
            return
        if job.state not in ENDED:
            return
        if run.written_to >= job.last_event_id:
            self._store(run)
            self._forget(run)
        elif time.time() - max(self._began_at, (job.finished_at or 0) / 1e6) > self._patience_s:
            self._give_up(run, job)

    def _give_up(self, run: FollowedRun, job: JobRow) -> None:
        with self._database.read() as tx:
            unwritten_steps = steps_after(tx, job.number, run.written_to)
        steps = "its end" if unwritten_steps is None else f"steps {unwritten_steps[0]} to {unwritten_steps[1]}"
        cause = run.trouble or "it does not respond"
        self._warn(run, f"gave up on {run.tracker} ({cause}): {steps} of this job were not written to it")
        run.written_to = job.last_event_id  # the warning's own event needs no tracker
        self._store(run)
        self._forget(run)

    def _forget(self, run: FollowedRun) -> None:
        if run.has_sent_open:
            self._processes.tell(TrackerOrder(job_id=run.job_id, tracker=run.tracker, close=True))
        del self._runs[run.row.job_number, run.row.tracker]

    def _look_after_processes(self) -> None:
        dead = self._processes.look_after({run.tracker for run in self._runs.values()})
        self._take_replies()  # the last ones of dead processes say why they ended
        for run in self._runs.values():
            if run.tracker in dead:
                run.begin_again()

    def _end_processes(self) -> None:
        self._processes.end()
        for run in self._runs.values():
            run.begin_again()

    def _store_progress(self) -> None:
        if time.monotonic() < self._store_at:
            return
        self._store_at = time.monotonic() + STORE_INTERVAL_S
        for run in self._runs.values():
            self._store(run)

    def _store(self, run: FollowedRun) -> None:
        if run.written_to != run.stored_to:
            with self._database.write() as tx:
                change_tracked_run(tx, run.row, written_to=run.written_to)
            run.stored_to = run.written_to

    def _warn(self, run: FollowedRun, message: str) -> None:
        log.warning("tracking", job=run.job_id, tracker=run.tracker, message=message)
        with self._database.read() as tx:
            job = get_by_number(tx, run.row.job_number)
        if job is not None:
            with self._lease.change(job) as (tx, events):
                events += warn(tx, job, [message], ACTOR)


def start(tracking: Tracking) -> Callable[[float], None]:
    """Run it in a thread; return a function that stops it, and waits for its end up to a number of seconds."""
    thread = threading.Thread(target=tracking.run, name="tracking", daemon=True)
    thread.start()

    def end(timeout_s: float) -> None:
        tracking.stop()
        thread.join(timeout_s)

    return end
