"""Reasons of queued jobs: whether their clusters answer."""

from collections.abc import Callable, Collection

from service.control.jobs.changes import explain
from service.control.jobs.lease import Lease
from service.control.launcher.launcher import ClusterKind
from service.control.scheduling.start_limits import MAX_PASSED
from service.control.scheduling.starter import ACTOR
from service.control.store.database import Database
from service.control.store.jobs import JobRow, first_queued, jobs_marked_unreachable
from service.wire.states import WAITS, State

MAX_EXPLAINED = 100
"""Maximum number of queued jobs whose reason is changed in one step."""


class QueueReasons:
    """Sets the reasons of queued jobs."""

    def __init__(self, database: Database, lease: Lease, cluster_of: Callable[[JobRow], ClusterKind]) -> None:
        """`cluster_of`: returns the kind of cluster that a job is to run on."""
        self._database, self._lease, self._cluster_of = database, lease, cluster_of

    def explain_unreachable(self, kind: ClusterKind, outage: str, since: float) -> None:
        """State in the reason of the cluster's first queued job why no job is admitted. Raises LeaseLost."""
        if (job := self._first_of(kind)) is None:
            return
        with self._lease.change(job) as (tx, events):
            values = {} if job.unreachable_since else {"unreachable_since": int(since * 1e6)}
            events += explain(tx, job, f"{WAITS}; {outage}", ACTOR, values)

    def explain_reachable(self, kinds: Collection[ClusterKind]) -> bool:
        """Clear "the cluster cannot be reached" from some queued jobs of these clusters; False if none. Raises
        LeaseLost."""
        with self._database.read() as tx:
            jobs = jobs_marked_unreachable(tx, State.QUEUED, MAX_EXPLAINED)
        jobs = [job for job in jobs if self._cluster_of(job) in kinds]
        for job in jobs:
            with self._lease.change(job) as (tx, events):
                # A job that the cluster was too small for is checked again, which restores its reason.
                events += explain(tx, job, WAITS, ACTOR, {"unreachable_since": None, "unfit_for": None})
        return bool(jobs)

    def _first_of(self, kind: ClusterKind) -> JobRow | None:
        position = (-1, -1)
        with self._database.read() as tx:
            for _ in range(MAX_PASSED):
                job = first_queued(tx, State.QUEUED, "", position)
                if job is None or self._cluster_of(job) == kind:
                    return job
                position = (job.queued_at, job.number)
        return None
