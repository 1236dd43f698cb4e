"""A standing cluster and clusters of jobs' own: one that does not answer holds up no job of the other."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from service.control.api.services import Services
from service.control.launcher.choice import LauncherChoice
from service.control.launcher.launcher import ClusterFacts, ClusterKind, Launcher, LauncherUnavailable, Observation
from service.control.scheduling import reachability, starter
from service.control.store.jobs import JobRow
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Result
from tests.processes import await_that
from tests.service.control_plane import NODE
from tests.service.controllers import controller_on, stored_job, submit_job
from tests.service.local_launcher import LocalLauncher

KINDS: tuple[ClusterKind, ...] = ("own", "shared")
OTHER: dict[ClusterKind, ClusterKind] = {"own": "shared", "shared": "own"}
PATIENCE_S = 30.0


class Cluster(LocalLauncher):
    """A cluster of one kind, which may hang: a call then lasts until it is released, and fails."""

    def __init__(self, folder: Path, kind: ClusterKind) -> None:
        super().__init__(folder)
        self._kind: ClusterKind = kind
        self.set_nodes(NODE.model_copy(update={"pool": "cpu" if kind == "own" else "", "id": kind}))
        self.hangs, self.release_event = False, threading.Event()

    def by_kind(self) -> Mapping[ClusterKind, Launcher]:
        return {self._kind: self}

    def check(self, resources: object) -> None:
        pass

    def cluster(self) -> ClusterFacts:
        self._hang()
        return super().cluster()

    def observe(self, submission_id: str) -> Observation:
        self._hang()
        return super().observe(submission_id)

    def _hang(self) -> None:
        if self.hangs:
            assert self.release_event.wait(PATIENCE_S), "somebody waits for a cluster that is known to hang"
            raise LauncherUnavailable("no answer")


class Clusters:
    """A controller over both kinds, stepped by the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.of: dict[ClusterKind, Cluster] = {kind: Cluster(folder / kind, kind) for kind in KINDS}
        self.services: Services
        self.start()

    def start(self) -> None:
        self.services = controller_on(self._folder, LauncherChoice(self.of["shared"], self.of["own"], "shared"))

    def restart(self) -> None:
        self.services.database.close()
        self.start()

    def post(self, kind: ClusterKind) -> str:
        """Id of a new job, whose driver runs until it is killed."""
        labels = {"silent": "yes", "step_ms": "100000"}
        return submit_job(self.services, resources={"num_workers": 1, "cluster": kind}, labels=labels).id

    def job(self, job_id: str) -> JobRow:
        return stored_job(self.services, job_id)

    def await_job(self, job_id: str, condition: Callable[[JobRow], bool]) -> JobRow:
        def is_there() -> bool:
            self.services.controller.step()
            return condition(self.job(job_id))

        await_that(is_there, lambda: self.job(job_id).reason, timeout_s=PATIENCE_S)
        return self.job(job_id)

    def await_launch(self, job_id: str) -> None:
        self.await_job(job_id, lambda job: job.launch == "submitted")

    def await_success(self, kind: ClusterKind, job_id: str) -> None:
        """End the job's driver as one that has trained, and see that the controller observes it."""
        self.await_launch(job_id)
        AttemptFolder(self.job(job_id).storage, 1).write_result(Result(outcome="succeeded", step=5))
        process = self.of[kind].process(f"{job_id}-a1")
        assert process is not None
        process.kill()
        self.await_job(job_id, lambda job: job.state == "succeeded")


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clusters]:
    monkeypatch.setattr(reachability, "REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(starter, "FACTS_AGE_S", 0.0)
    clusters = Clusters(tmp_path)
    yield clusters
    for cluster in clusters.of.values():
        cluster.release_event.set()
        cluster.end_all()
    clusters.services.database.close()


@pytest.mark.parametrize("silent", KINDS)
def test_a_silent_cluster_holds_up_no_job_of_the_other(clusters: Clusters, silent: ClusterKind) -> None:
    running = clusters.post(silent)
    clusters.await_launch(running)
    clusters.of[silent].set_reachable(False)
    waiting = clusters.post(silent)
    clusters.restart()  # a controller that has not seen any of them
    other = clusters.post(OTHER[silent])
    clusters.await_success(OTHER[silent], other)
    for job_id in (running, waiting):
        job = clusters.await_job(job_id, lambda job: "the cluster has been unreachable since 20" in job.reason)
        assert job.reason.endswith("connection refused")
        assert job.unreachable_since is not None
    assert clusters.services.controller.unreachable.keys() == {silent}
    assert clusters.job(waiting).attempt == 0
    clusters.of[silent].set_reachable(True)
    clusters.await_success(silent, waiting)
    assert clusters.await_job(running, lambda job: job.unreachable_since is None).attempt == 1
    assert clusters.of[silent].launches() == [f"{running}-a1", f"{waiting}-a1"]
    assert clusters.of[OTHER[silent]].launches() == [f"{other}-a1"]


def test_nobody_waits_twice_for_a_cluster_that_hangs(clusters: Clusters) -> None:
    """Its first silence may cost a timeout; later it is asked in the background."""
    running = clusters.post("shared")
    clusters.await_launch(running)
    standing = clusters.of["shared"]
    standing.set_reachable(False)
    clusters.await_job(running, lambda job: job.unreachable_since is not None)
    standing.hangs = True
    own = clusters.post("own")
    clusters.await_success("own", own)
    forecast = clusters.job(clusters.post("shared"))
    assert "the cluster has been unreachable since 20" in forecast.reason
    standing.hangs = False
    standing.release_event.set()
    standing.set_reachable(True)
    clusters.await_job(running, lambda job: job.unreachable_since is None)
