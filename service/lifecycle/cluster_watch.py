"""The cluster's facts, asked for once for everybody."""

import threading
import time

from service.launch.launcher import ClusterFacts, Launcher, LauncherUnavailable


class ClusterWatch:
    """What the cluster said last. Safe to share between threads.

    One thread asks at a time. Others meanwhile get what was said before, however old: a cluster that answers
    slowly must not make everybody slow.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._asking = threading.Lock()
        self._answer: ClusterFacts | LauncherUnavailable | None = None
        self._asked_at = -float("inf")

    def facts(self, max_age_s: float) -> ClusterFacts:
        """Raises LauncherUnavailable when the cluster did not answer the last time it was asked."""
        if self._is_old(max_age_s) and self._asking.acquire(blocking=self._answer is None):
            try:
                if self._is_old(max_age_s):
                    self._ask()
            finally:
                self._asking.release()
        answer = self._answer
        if isinstance(answer, ClusterFacts):
            return answer
        raise LauncherUnavailable(str(answer))

    def _is_old(self, max_age_s: float) -> bool:
        return time.monotonic() - self._asked_at > max_age_s

    def _ask(self) -> None:
        try:
            self._answer = self._launcher.cluster()
        except LauncherUnavailable as error:
            self._answer = error
        self._asked_at = time.monotonic()
