"""Limits on the attempts that one step may start, by cluster."""

from collections.abc import Iterable

MAX_STARTING = 4
"""Maximum number of attempts that are starting at once on a standing Ray cluster, which handles many poorly, and of
attempts that one step starts on clusters of their own."""
MAX_PASSED = 100
"""Maximum number of queued jobs that one step passes over because they wait for another cluster."""


class StartLimits:
    """Attempts that may still start in this step; a job that waits for a cluster holds back the jobs behind it."""

    def __init__(self, num_starting: int, clusters: Iterable[str]) -> None:
        """`num_starting`: attempts that are starting on the standing cluster. `clusters`: kinds that have nodes."""
        self._num_remaining = {"shared": MAX_STARTING - num_starting, "own": MAX_STARTING}
        self._clusters = frozenset(clusters)
        self._num_passed = 0

    def allow(self, cluster: str) -> bool:
        """Whether a job of this cluster may start."""
        is_allowed = self._num_remaining[cluster] > 0
        self._num_passed += not is_allowed
        return is_allowed

    @property
    def is_over(self) -> bool:
        """Whether no further job can start in this step."""
        is_full = all(self._num_remaining[cluster] <= 0 for cluster in self._clusters)
        return is_full or self._num_passed >= MAX_PASSED

    def note_start(self, cluster: str) -> None:
        self._num_remaining[cluster] -= 1

    def note_wait(self, cluster: str) -> None:
        """Note that a job waits for the cluster's resources: first come, first served."""
        self._num_remaining[cluster] = 0
