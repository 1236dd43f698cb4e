"""The driver's watch over its run outlives what it cannot read."""

import threading
from pathlib import Path

import pytest
from ray.exceptions import RayActorError
from ray.train.v2.api.exceptions import WorkerGroupError

from service.run.driver import Driver
from service.run.notices import GroupFailures
from service.run.placement import what_lacks
from service.wire.attempt_folder import AttemptFolder
from tests.processes import DEADLINE_S, await_that
from tests.procs.launching import launch
from tests.procs.receiver import Receiver

pytestmark = pytest.mark.usefixtures("node")


def test_storage_that_cannot_be_read_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver().start()
    driver = Driver(_launch(tmp_path, receiver.url))
    folder = tmp_path / "storage" / "attempts" / "1"
    folder.rename(folder.with_name("moved"))
    folder.touch()
    _lose_group(driver)
    watching = threading.Thread(target=driver._repeat, args=(0.05, driver._look))
    watching.start()
    try:
        await_that(lambda: "cannot watch the run" in caplog.text)
        folder.unlink()
        folder.with_name("moved").rename(folder)
        await_that(lambda: "recovering" in [record["kind"] for record in receiver.records["driver"]])
        assert receiver.records["driver"][-1]["data"] == {
            "reason": "rank 1 was lost: its process died", "kind": "lost", "preempted": False,
        }  # fmt: skip
        assert caplog.text.count("cannot watch the run") == 1, "said once, not four times a second"
    finally:
        driver._over.set()
        watching.join()
        driver._recorder.close()
        receiver.stop()


def test_storage_that_hangs_holds_up_no_heartbeat(tmp_path: Path) -> None:
    driver = Driver(_launch(tmp_path, "http://127.0.0.1:9"))
    hangs, looked = threading.Event(), threading.Event()

    class Watch:  # in place of a worker group's: whether it is looked at is what counts
        look = staticmethod(looked.set)

    class HangingFolder:  # a share whose server is gone: no file system of this machine hangs on demand
        def groups(self) -> list[int]:
            hangs.wait()
            return []

    driver._group_watch = Watch()  # type: ignore[assignment]
    driver._folder = driver._keeper._folder = HangingFolder()  # type: ignore[assignment]
    _lose_group(driver)
    threads = driver._begin_watch()
    try:
        assert looked.wait(DEADLINE_S)
        looked.clear()
        assert looked.wait(DEADLINE_S), "and again and again"
    finally:
        driver._over.set()
        hangs.set()
        for thread in threads:
            thread.join()
        driver._recorder.close(patience_s=0.0)


def test_a_group_that_died_before_it_began_hides_none_after_it(tmp_path: Path) -> None:
    path = _launch(tmp_path, "http://127.0.0.1:9")
    driver, (attempt, _) = Driver(path), AttemptFolder.open_launch(path)
    _lose_group(driver)
    driver._tell_of_dead_groups()
    assert not driver._group_runs()
    attempt.begin_group(0)
    driver._tell_of_dead_groups()
    assert driver._group_runs()
    driver._recorder.close(patience_s=0.0)


def test_why_workers_have_not_begun_is_told_once_and_only_if_it_is_so(tmp_path: Path) -> None:
    receiver = Receiver().start()
    lacks: str | None = None
    driver = Driver(_launch(tmp_path, receiver.url), why_unplaced=lambda *_: lacks)
    for runs in (False, False, False, True, False):
        driver._tell_of_waiting(runs)  # placed each time, and slow
    lacks = "others hold all"
    for runs in (True, False, False, False):
        driver._tell_of_waiting(runs)
    driver._recorder.close()
    receiver.stop()
    told = [record["data"]["reason"] for record in receiver.records["driver"] if record["kind"] == "waiting"]
    assert told == [
        "1 worker placed (1 CPU each); waiting for them to start",
        "waiting for resources for 1 worker (1 CPU each): others hold all",
    ]


def test_what_a_cluster_lacks() -> None:
    free, all_ = {"CPU": 1.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}
    assert what_lacks({"CPU": 2, "GPU": 2}, all_, free) == (
        "other programs hold the cluster's resources: 1 of 4 CPUs are free"
    )
    assert what_lacks({"CPU": 8, "GPU": 0}, all_, free) == "the cluster has only 4 CPUs now"
    assert what_lacks({"CPU": 1, "GPU": 0}, all_, free).startswith(
        "the free resources are spread over nodes in parts that are too small"
    )
    assert what_lacks({"CPU": 1, "GPU": 1}, {"CPU": 4.0}, {}) == "the cluster has only 0 GPUs now"


def _lose_group(driver: Driver) -> None:
    driver._failures = driver._failures or GroupFailures(driver._launch)
    driver._failures.make_decision(WorkerGroupError("died", {1: RayActorError()}))


def _launch(tmp_path: Path, events_url: str) -> str:
    """The path of an attempt's launch."""
    given = launch(tmp_path, events_url)
    return AttemptFolder(given.storage, given.attempt).write_launch(given)
