"""Lease: the permission to act, which one control plane at a time holds, and which every change checks."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from service.control.report.event_text import WireEvent
from service.control.report.hub import Hub
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.jobs import JobRow
from service.control.store.leases import holds_lease, release_lease, take_lease


class LeaseLost(Exception):
    """The lease was lost: another control plane acts now."""


class Lease:
    """This control plane's hold on the lease row."""

    def __init__(self, database: Database, hub: Hub, holder: str, lease_s: float) -> None:
        self._database, self._hub, self._holder = database, hub, holder
        self._lease_us = int(lease_s * 1e6)
        self._renew_at = 0
        self.is_held = False

    def take(self) -> bool:
        """Take the lease, or renew it after a third of its time; False if another holds it."""
        time_us = now_us()
        if self.is_held and time_us < self._renew_at:
            return True
        with self._database.write() as tx:
            self.is_held = take_lease(tx, self._holder, time_us, self._lease_us)
        self._renew_at = time_us + self._lease_us // 3
        return self.is_held

    def require(self) -> None:
        """Check, before a change of the cluster, that no other control plane has acted since `take`, and renew the
        lease. Raises LeaseLost: a step may last longer than the lease, or the process may have been stopped."""
        time_us = now_us()
        if self.is_held and time_us < self._renew_at:
            return
        with self._database.write() as tx:
            if not holds_lease(tx, self._holder):  # another's lease counts even if it has expired
                self.is_held = False
                raise LeaseLost
            take_lease(tx, self._holder, time_us, self._lease_us)
        self._renew_at = time_us + self._lease_us // 3

    def release(self) -> None:
        """Let another control plane act at once."""
        with self._database.write() as tx:
            release_lease(tx, self._holder)
        self.is_held = False

    @contextmanager
    def change(self, job: JobRow) -> Iterator[tuple[Connection, list[WireEvent]]]:
        """A transaction and its events, published after the commit. Raises LeaseLost, with nothing changed, if
        another control plane has taken over: this one may have been stopped for longer than its lease."""
        with self.change_jobs() as (tx, events):
            yield tx, events[job.id]

    @contextmanager
    def change_jobs(self) -> Iterator[tuple[Connection, defaultdict[str, list[WireEvent]]]]:
        """As `change`, for several jobs; events by job id."""
        events: defaultdict[str, list[WireEvent]] = defaultdict(list)
        with self.write() as tx:
            yield tx, events
        for job_id, job_events in events.items():
            self._hub.publish(job_id, job_events)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction of the holder. Raises LeaseLost as `change` does."""
        with self._database.write() as tx:
            if not holds_lease(tx, self._holder):
                self.is_held = False
                raise LeaseLost
            yield tx
