"""Cached facts about the cluster, shared by all threads."""

import threading
import time
from pathlib import Path

from moe.plan import Calibration
from moe.plan.cluster.calibration import CLUSTER_FILE, FILE, read_calibration, write_calibration
from moe.spec import ResourcesSpec
from service.control.errors import Conflict
from service.control.launcher.launcher import ClusterFacts, Launcher, LauncherUnavailable
from service.control.scheduling.reachability import unreachable


class ClusterWatch:
    """The cluster's last answer, with the measurements of `shardyard calibrate`. Thread-safe.

    One thread queries at a time; the others get the previous answer, however old, so that a slow cluster does not
    block them, except answers from before `expire`. Measurements are read from the cache each time, so that plans use
    them at once.
    """

    def __init__(self, launcher: Launcher, cache: Path | None = None) -> None:
        self._launcher, self._cache = launcher, cache
        self._asking, self._calibrating = threading.Lock(), threading.Lock()
        self._answer: ClusterFacts | LauncherUnavailable | None = None
        self._queried_at = self._answered_at = self._expired_at = -float("inf")
        self._unreachable_since: float | None = None

    def facts(self, max_age_s: float) -> ClusterFacts:
        """Facts at most `max_age_s` old. Raises LauncherUnavailable if the last query failed."""
        if self._is_old(max_age_s) and self._asking.acquire(blocking=not self._has_answer()):
            try:
                if self._is_old(max_age_s):
                    self._ask()
            finally:
                self._asking.release()
        answer = self._answer
        if isinstance(answer, ClusterFacts):
            return answer.model_copy(update={"calibrations": self._calibrations(answer)})
        raise LauncherUnavailable(str(answer))

    def check(self, resources: ResourcesSpec) -> None:
        """Check that the operator offers these resources. Raises SpecError."""
        self._launcher.check(resources)

    def expire(self) -> None:
        """Discard the facts: the cluster was just found unreachable."""
        self._expired_at = time.monotonic()
        self._unreachable_since = self._unreachable_since or time.time()

    def unreachable(self, error: LauncherUnavailable) -> str:
        """Sentence that the cluster is unreachable, and since when."""
        return unreachable(self._unreachable_since or time.time(), str(error))

    def calibrate(self) -> Calibration:
        """Measure the cluster for future plans. Raises as `Launcher.calibrate`, and Conflict during another
        measurement."""
        if not self._calibrating.acquire(blocking=False):
            raise Conflict("the cluster is already being measured; wait for the result")
        try:
            facts = self.facts(0.0)
            calibration = self._launcher.calibrate().model_copy(update={"accelerator": facts.accelerators})
            if self._cache is not None:
                write_calibration(self._cache, calibration, _file_of(calibration.device, facts))
            return calibration
        finally:
            self._calibrating.release()

    def _calibrations(self, facts: ClusterFacts) -> tuple[Calibration, ...]:
        if self._cache is None:
            return ()
        candidates = (read_calibration(self._cache, _file_of(device, facts)) for device in ("cpu", "cuda"))
        return tuple(
            calibration
            for calibration in candidates
            if calibration and calibration.accelerator in (None, facts.accelerators)
        )

    def _is_old(self, max_age_s: float) -> bool:
        return not self._has_answer() or time.monotonic() - self._answered_at > max_age_s

    def _has_answer(self) -> bool:
        return self._answer is not None and self._queried_at > self._expired_at

    def _ask(self) -> None:
        queried_at = time.monotonic()
        try:
            self._answer = self._launcher.cluster()
            self._unreachable_since = None
        except LauncherUnavailable as error:
            self._answer = error
            self._unreachable_since = self._unreachable_since or time.time()
        self._queried_at, self._answered_at = queried_at, time.monotonic()


def _file_of(device: str, facts: ClusterFacts) -> str:
    """Path of a calibration in the cache; for a single node's CPUs, the file of `shardyard calibrate`."""
    return FILE if device == "cpu" and len(facts.nodes) == 1 else CLUSTER_FILE.format(device)
