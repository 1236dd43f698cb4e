"""The cluster's facts, asked for once for everybody."""

import threading
import time
from pathlib import Path

from moe.plan.calibration import read_calibration
from service.launch.launcher import ClusterFacts, Launcher, LauncherUnavailable


class ClusterWatch:
    """What the cluster said last; of a single node, with what `shardyard calibrate` measured here. Safe to share
    between threads.

    One thread asks at a time. Others meanwhile get what was said before, however old: a cluster that answers
    slowly must not make everybody slow.
    """

    def __init__(self, launcher: Launcher, cache: Path | None = None) -> None:
        self._launcher, self._cache = launcher, cache
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
            facts = self._launcher.cluster()
            if self._cache is not None and len(facts.nodes) == 1:
                facts = facts.model_copy(update={"calibration": read_calibration(self._cache)})
            self._answer = facts
        except LauncherUnavailable as error:
            self._answer = error
        self._asked_at = time.monotonic()
