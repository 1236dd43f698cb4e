"""Cached facts about the clusters, shared by all threads."""

import threading
import time
from pathlib import Path

from moe.plan import Calibration
from moe.plan.cluster.calibration import CLUSTER_FILE, FILE, read_calibration, write_calibration
from moe.spec import ResourcesSpec
from service.control.errors import Conflict
from service.control.launcher.launcher import ClusterFacts, ClusterKind, Launcher, LauncherUnavailable
from service.control.scheduling.cluster_query import ClusterQuery
from service.control.scheduling.reachability import describe_outage


class ClusterWatch:
    """The clusters' last answers, with the measurements of `shardyard calibrate`. Thread-safe.

    Measurements are read from the cache at every call, so that plans use new ones at once.
    """

    def __init__(self, launcher: Launcher, cache: Path | None = None) -> None:
        self._launcher, self._cache = launcher, cache
        self._queries = {kind: ClusterQuery(kind_launcher) for kind, kind_launcher in launcher.by_kind().items()}
        self._calibrating = threading.Lock()

    def facts(self, max_age_s: float) -> ClusterFacts:
        """Facts at most `max_age_s` old about the clusters that answer. Raises LauncherUnavailable if none does."""
        answers = self._ask(max_age_s)
        known = [answer for answer in answers.values() if isinstance(answer, ClusterFacts)]
        if not known:
            raise next(answer for answer in answers.values() if isinstance(answer, LauncherUnavailable))
        facts = known[0]
        if len(answers) > 1:
            nodes = tuple(node for answer in known for node in answer.nodes)
            facts = ClusterFacts(nodes=nodes, default_cluster=next(iter(answers)))
        return facts.model_copy(update={"calibrations": self._calibrations(facts)})

    def facts_for(self, resources: ResourcesSpec, max_age_s: float) -> ClusterFacts:
        """Facts for a job with these resources. Raises LauncherUnavailable if its own cluster does not answer."""
        facts = self.facts(max_age_s)
        if (error := self.silent_clusters(max_age_s).get(facts.cluster_of(resources))) is not None:
            raise error
        return facts

    def silent_clusters(self, max_age_s: float) -> dict[ClusterKind, LauncherUnavailable]:
        """Clusters that do not answer. They are queried in the background, so that callers do not wait for them. Empty
        if there is only one cluster, whose callers wait."""
        if len(self._queries) == 1:
            return {}
        answers = self._ask(max_age_s).items()
        return {kind: answer for kind, answer in answers if isinstance(answer, LauncherUnavailable)}

    def check(self, resources: ResourcesSpec) -> None:
        """Check that the operator offers these resources. Raises SpecError."""
        self._launcher.check(resources)

    def expire(self, kind: ClusterKind | None = None) -> None:
        """Discard the facts about a cluster that has just become unreachable; by default, about all clusters."""
        for query_kind, query in self._queries.items():
            if kind in (None, query_kind):
                query.expire()

    @staticmethod
    def describe_outage(error: LauncherUnavailable) -> str:
        """Sentence with the start and the cause of the cluster's outage."""
        return describe_outage(error.since or time.time(), str(error))

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

    def _ask(self, max_age_s: float) -> dict[ClusterKind, ClusterFacts | LauncherUnavailable]:
        waits = len(self._queries) == 1
        return {kind: query.answer(max_age_s, waits=waits) for kind, query in self._queries.items()}

    def _calibrations(self, facts: ClusterFacts) -> tuple[Calibration, ...]:
        if self._cache is None:
            return ()
        candidates = (read_calibration(self._cache, _file_of(device, facts)) for device in ("cpu", "cuda"))
        return tuple(
            calibration
            for calibration in candidates
            if calibration and calibration.accelerator in (None, facts.accelerators)
        )


def _file_of(device: str, facts: ClusterFacts) -> str:
    """Path of a calibration in the cache; for a single node's CPUs, the file of `shardyard calibrate`."""
    return FILE if device == "cpu" and len(facts.nodes) == 1 else CLUSTER_FILE.format(device)
