"""Measurements are part of the very next answer, and an answer is not given again once the cluster is out of reach."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe.plan import Calibration
from service.control.launcher.launcher import ClusterFacts, LauncherUnavailable, NodeFacts
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.reach import Reach
from tests.service.local_launcher import LocalLauncher

PATIENCE_S = 30.0


class HeldLauncher(LocalLauncher):
    """Answers what the cluster has at once the first time, then only when let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked, self.let_go = threading.Event(), threading.Event()
        self._answers = iter([True])

    def cluster(self) -> ClusterFacts:
        if not next(self._answers, False):
            self.asked.set()
            assert self.let_go.wait(PATIENCE_S)
        return super().cluster()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[HeldLauncher]:
    launcher = HeldLauncher(tmp_path / "launcher")
    launcher.set_nodes(NodeFacts(id="here", ip="127.0.0.1", cpus=2, memory_bytes=2**30))
    yield launcher
    launcher.let_go.set()


def test_measured_while_the_cluster_is_being_asked(launcher: HeldLauncher, tmp_path: Path) -> None:
    watch = ClusterWatch(launcher, tmp_path / "cache")
    assert watch.facts(0.0).calibrations == ()
    asking = threading.Thread(target=watch.facts, args=(0.0,))
    asking.start()
    assert launcher.asked.wait(PATIENCE_S)  # the old answer is all that there is, and another one comes later

    found: Calibration = watch.calibrate()
    assert watch.facts(0.0).calibrations == (found,)
    launcher.let_go.set()
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert watch.facts(PATIENCE_S).calibrations == (found,)


def test_an_answer_is_not_given_again_after_the_cluster_was_found_out_of_reach(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "launcher")
    launcher.set_nodes(NodeFacts(id="here", ip="127.0.0.1", cpus=2, memory_bytes=2**30))
    watch = ClusterWatch(launcher)
    reach = Reach(on_silence=watch.expire)
    assert watch.facts(PATIENCE_S).cpus == 2
    launcher.set_reachable(False)
    assert watch.facts(PATIENCE_S).cpus == 2  # nobody knows better yet

    reach.record_failure(LauncherUnavailable("no answer to a question about a job"))
    with pytest.raises(LauncherUnavailable):
        watch.facts(PATIENCE_S)


def test_an_answer_to_an_earlier_question_does_not_count_either(launcher: HeldLauncher, tmp_path: Path) -> None:
    """The question was on its way when the cluster was found to be out of reach."""
    watch = ClusterWatch(launcher, tmp_path / "cache")
    watch.facts(0.0)
    asking = threading.Thread(target=watch.facts, args=(0.0,))
    asking.start()
    assert launcher.asked.wait(PATIENCE_S)
    watch.expire()
    launcher.let_go.set()
    asking.join(PATIENCE_S)
    launcher.set_reachable(False)
    with pytest.raises(LauncherUnavailable):
        watch.facts(PATIENCE_S)
