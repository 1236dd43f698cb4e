"""A launcher's last answer about its cluster."""

import threading
import time

from service.control.launcher.launcher import ClusterFacts, Launcher, LauncherUnavailable


class ClusterQuery:
    """Asks one launcher for its cluster's facts. Thread-safe.

    One thread queries at a time. The others get the previous answer, however old, so that a slow cluster does not block
    them; but no answer from before `expire`.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._query_lock = threading.Lock()
        self._answer: ClusterFacts | LauncherUnavailable | None = None
        self._queried_at = self._answered_at = self._expired_at = -float("inf")
        self._unreachable_since: float | None = None

    def answer(self, max_age_s: float, *, waits: bool) -> ClusterFacts | LauncherUnavailable:
        """Facts at most `max_age_s` old, or the reason why there are none. Unless the caller `waits`, a cluster
        that did not answer its last query is queried in the background."""
        if not waits and isinstance(self._answer, LauncherUnavailable):
            if self._is_old(max_age_s) and self._query_lock.acquire(blocking=False):
                threading.Thread(target=self._query_and_release, name="cluster-query", daemon=True).start()
        elif self._is_old(max_age_s) and self._query_lock.acquire(blocking=not self._has_answer()):
            try:
                if self._is_old(max_age_s):
                    self._query()
            finally:
                self._query_lock.release()
        answer = self._answer
        if isinstance(answer, ClusterFacts):
            return answer
        return LauncherUnavailable(str(answer), answer is not None and answer.runs_nothing, self._unreachable_since)

    def expire(self) -> None:
        """Discard the facts: the cluster has just become unreachable."""
        self._expired_at = time.monotonic()
        self._unreachable_since = self._unreachable_since or time.time()

    def _is_old(self, max_age_s: float) -> bool:
        return not self._has_answer() or time.monotonic() - self._answered_at > max_age_s

    def _has_answer(self) -> bool:
        return self._answer is not None and self._queried_at > self._expired_at

    def _query(self) -> None:
        queried_at = time.monotonic()
        try:
            self._store_answer(self._launcher.cluster())
        except LauncherUnavailable as error:
            self._store_answer(error)
        self._queried_at, self._answered_at = queried_at, time.monotonic()

    def _query_and_release(self) -> None:
        try:
            self._query()
        except Exception as error:  # nobody waits for it: the next caller gets it as the reason
            self._store_answer(LauncherUnavailable(repr(error)))
        finally:
            self._query_lock.release()

    def _store_answer(self, answer: ClusterFacts | LauncherUnavailable) -> None:
        if isinstance(answer, ClusterFacts):
            self._unreachable_since = None
        else:
            self._unreachable_since = self._unreachable_since or time.time()
        self._answer = answer
