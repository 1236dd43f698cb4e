"""Processes of the trackers in use, restarted when they die."""

import time
from collections.abc import Collection

import structlog

from moe.spec.track import TrackerName
from service.tracker.messages import TrackerOrder, TrackerReply
from service.tracker.process import TrackerProcess

RESTART_FIRST_S, RESTART_MOST_S = 1.0, 60.0
log = structlog.get_logger(__name__)


class TrackerProcesses:
    """One process per tracker: after some errors, a tracker's library needs a new process, and the other trackers must
    not be affected."""

    def __init__(self) -> None:
        self._processes: dict[TrackerName, TrackerProcess] = {}
        self._restart_at: dict[TrackerName, float] = {}
        self._wait_s: dict[TrackerName, float] = {}
        self._last_replies: list[TrackerReply] = []
        """Replies of dead processes, not yet returned."""

    def tell(self, order: TrackerOrder) -> bool:
        """Send an order; False while a dead process may not be replaced yet."""
        tracker = order.tracker
        if tracker not in self._processes:
            if time.monotonic() < self._restart_at.get(tracker, 0.0):
                return False
            self._processes[tracker] = TrackerProcess()
        self._processes[tracker].tell(order)
        return True

    def replies(self) -> list[TrackerReply]:
        """Replies since the last call. A confirmation shows that the process works."""
        replies, self._last_replies = self._last_replies, []
        replies += [reply for process in self._processes.values() for reply in process.replies()]
        for reply in replies:
            if reply.kind == "written":
                self._wait_s.pop(reply.tracker, None)
        return replies

    def look_after(self, used: Collection[TrackerName]) -> set[TrackerName]:
        """End processes that are not used any more. Returns the trackers whose processes have died; the next `replies`
        has their last ones."""
        dead = set()
        for tracker, process in list(self._processes.items()):
            if not process.runs:
                wait_s = self._wait_s.get(tracker, RESTART_FIRST_S)
                log.warning("a tracker process ended; another will start", tracker=tracker, cause=process.status)
                self._restart_at[tracker] = time.monotonic() + wait_s
                self._wait_s[tracker] = min(RESTART_MOST_S, 2 * wait_s)
                dead.add(tracker)
            if tracker in dead or tracker not in used:
                self._processes.pop(tracker)
                process.end()
            if tracker in dead:
                self._last_replies += process.replies()
        return dead

    def end(self) -> None:
        """Kill all processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()
