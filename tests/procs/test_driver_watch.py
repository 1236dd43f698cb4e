"""The driver's watch outlives storage that it cannot read; why worker groups died, and whether others follow."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from moe.parallel import CollectiveError
from moe.train.control import NoControl
from service.run.driver import Driver
from service.run.end_notice import MAX_AGE_S, give_notice, has_notice, notice_path
from service.run.heartbeat import Heartbeat
from service.run.heartbeat_server import HeartbeatServer
from service.run.notices import GroupFailure, GroupFailures
from service.run.placement import missing_resources
from service.run.worker_control import WorkerControl
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
    thread = threading.Thread(target=driver._repeat, args=(0.05, driver._look))
    thread.start()
    try:
        await_that(lambda: "cannot watch the run" in caplog.text)
        folder.unlink()
        folder.with_name("moved").rename(folder)
        await_that(lambda: "recovering" in [record["kind"] for record in receiver.records["driver"]])
        assert receiver.records["driver"][-1]["data"] == {
            "reason": "rank 1 was lost: its process died", "kind": "lost", "preempted": False, "at_start": False,
        }  # fmt: skip
        assert caplog.text.count("cannot watch the run") == 1, "said once, not four times a second"
    finally:
        driver._ended.set()
        thread.join()
        driver._recorder.close()
        receiver.stop()


def test_storage_that_hangs_holds_up_no_heartbeat(tmp_path: Path) -> None:
    driver = Driver(_launch(tmp_path, NOWHERE))
    hangs, look_event = threading.Event(), threading.Event()

    class Watch:  # in place of a worker group's: only the calls of `look` count
        look = staticmethod(look_event.set)

    class HangingFolder:  # a share whose server is gone: no file system of this machine hangs on demand
        def groups(self) -> list[int]:
            hangs.wait()
            return []

    driver._group_watch = Watch()
    driver._folder = driver._keeper._folder = HangingFolder()
    _lose_group(driver)
    threads = driver._begin_watch()
    try:
        assert look_event.wait(DEADLINE_S)
        look_event.clear()
        assert look_event.wait(DEADLINE_S), "and again and again"
    finally:
        driver._ended.set()
        hangs.set()
        for thread in threads:
            thread.join()
        driver._recorder.close(patience_s=0.0)


def test_a_group_that_died_before_it_began_hides_none_after_it(tmp_path: Path) -> None:
    path = _launch(tmp_path, NOWHERE)
    driver, (attempt, _) = Driver(path), AttemptFolder.open_launch(path)
    _lose_group(driver)
    driver._report_dead_groups()
    assert not driver._group_runs()
    attempt.begin_group(0)
    driver._report_dead_groups()
    assert driver._group_runs()
    driver._recorder.close(patience_s=0.0)


def test_a_driver_whose_node_is_told_to_end_tells_its_ranks_or_ends(tmp_path: Path) -> None:
    path = _launch(tmp_path, NOWHERE)
    driver, (attempt, _) = Driver(path), AttemptFolder.open_launch(path)
    driver._ended.set()  # so that it does not interrupt this process
    heartbeats = driver._heartbeats = HeartbeatServer("127.0.0.1")
    heartbeat = Heartbeat(heartbeats.address, 0, "n1")
    control = WorkerControl(NoControl(), heartbeat)
    heartbeat.start()
    try:
        await_that(lambda: len(heartbeats.ranks()) == 1)
        assert not control.is_preempted()
        attempt.begin_group(0)
        give_notice()
        driver._look()
        assert driver._result is None, "its workers save first"
        notice_path().unlink()  # the workers are on another node
        await_that(control.is_preempted)
        give_notice()
        driver._num_dead_groups = 1
        driver._look()
        assert driver._result is not None
        assert driver._result.outcome == "preempted"
    finally:
        heartbeat.stop()
        heartbeats.close()
        driver._recorder.close(patience_s=0.0)


def test_only_a_fresh_notice_of_this_user_counts(tmp_path: Path) -> None:
    assert not has_notice()
    notice_path().symlink_to(tmp_path)
    assert not has_notice()
    notice_path().unlink()
    give_notice()
    assert has_notice()
    notice_path().write_text("1234567")  # of a container that was restarted since, on the same pod's disk
    assert not has_notice()
    give_notice()
    assert has_notice()
    os.utime(notice_path(), times=(0, time.time() - MAX_AGE_S - 1))
    assert not has_notice()


def test_why_workers_have_not_begun_is_told_once_and_only_if_it_is_so(tmp_path: Path) -> None:
    receiver = Receiver().start()
    lacks: str | None = None
    driver = Driver(_launch(tmp_path, receiver.url), explain_placement=lambda *_: lacks)
    for runs in (False, False, False, True, False):
        driver._report_waiting(runs)  # placed each time, and slow
    lacks = "others hold all"
    for runs in (True, False, False, False):
        driver._report_waiting(runs)
    driver._recorder.close()
    receiver.stop()
    reasons = [record["data"]["reason"] for record in receiver.records["driver"] if record["kind"] == "waiting"]
    assert reasons == [
        "1 worker placed (1 CPU each); waiting for them to start",
        "waiting for resources for 1 worker (1 CPU each): others hold all",
    ]


def test_what_a_cluster_lacks() -> None:
    free, total = {"CPU": 1.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}
    for cpus, gpus, cluster, available, words in (
        (2, 2, total, free, "other programs hold the cluster's resources: 1 of 4 CPUs are free"),
        (8, 0, total, free, "the cluster has only 4 CPUs now"),
        (1, 0, total, free, "the free resources are spread over nodes in parts that are too small"),
        (1, 1, {"CPU": 4.0}, {}, "the cluster has only 0 GPUs now"),
    ):
        assert missing_resources({"CPU": cpus, "GPU": gpus}, cluster, available).startswith(words)


NOWHERE = "http://127.0.0.1:9"


def _lose_group(driver: Driver) -> None:
    driver._failures = driver._failures or GroupFailures(driver._launch)
    driver._failures.make_decision(WorkerGroupError("died", {1: RayActorError()}))


def _launch(tmp_path: Path, events_url: str) -> str:
    """The path of an attempt's launch."""
    small_launch = launch(tmp_path, events_url)
    return AttemptFolder(small_launch.storage, small_launch.attempt).write_launch(small_launch)


BROKEN_COLLECTIVE = UserExceptionWithTraceback(CollectiveError("all-reduce failed on rank 0 of 4"), "a traceback")
BROKEN = UserExceptionWithTraceback(RuntimeError("Connection closed by peer\nand more"), "a traceback")
LOST = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError())
OUT_OF_MEMORY = UserExceptionWithTraceback(torch.OutOfMemoryError("CUDA out of memory"), "a traceback")


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        ({0: BROKEN, 1: LOST}, "lost", "rank 1 was lost: its process died"),
        ({0: BROKEN_COLLECTIVE, 1: LOST, 2: LOST}, "lost", "ranks 1-2 were lost: their processes died"),
        ({0: BROKEN_COLLECTIVE, 3: BROKEN}, "error", "rank 3 failed: RuntimeError: Connection closed by peer"),
        ({0: BROKEN_COLLECTIVE}, "error", "rank 0 failed: CollectiveError: all-reduce failed on rank 0 of 4"),
        ({0: BROKEN}, "error", "rank 0 failed: RuntimeError: Connection closed by peer"),
        ({0: BROKEN, 3: OUT_OF_MEMORY}, "out_of_memory", "rank 3 failed: OutOfMemoryError: CUDA out of memory"),
        ({1: LOST, 3: OUT_OF_MEMORY}, "out_of_memory", "rank 3 failed: OutOfMemoryError: CUDA out of memory"),
        ({0: MemoryError()}, "out_of_memory", "rank 0 failed: MemoryError: no message"),
    ],
)
def test_causes_are_named_before_what_they_broke(errors: dict[int, Any], kind: str, words: str, tmp_path: Path) -> None:
    failures = failures_of(tmp_path)
    failures.make_decision(WorkerGroupError("died", errors))
    assert [(notice.kind, notice.reason) for notice in failures.notices()] == [(kind, words)]


def test_ranks_whose_collectives_broke_name_the_lost_node(tmp_path: Path) -> None:
    loss = "node 10.0.0.3 (worker-2) was lost; ranks 4-7 ran there"
    failures = GroupFailures(launch(tmp_path), explain_loss=lambda ranks: loss)
    for errors in ({0: BROKEN_COLLECTIVE}, {0: BROKEN_COLLECTIVE, 4: LOST}, {0: BROKEN}, {0: OUT_OF_MEMORY, 4: LOST}):
        failures.make_decision(WorkerGroupError("died", errors))
    kinds = [notice.kind for notice in failures.notices()]
    assert kinds == ["lost", "lost", "error", "out_of_memory"]
    assert [notice.reason == loss for notice in failures.notices()] == [True, True, False, False]


def failures_of(
    folder: Path, *, retry: dict[str, Any] | None = None, reasons: list[str] | None = None, **changes: Any
) -> GroupFailures:
    """`reasons`: why the driver ended ranks, in turn."""
    small_launch = launch(folder, retry=retry or {}).model_copy(update=changes)
    return (
        GroupFailures(small_launch)
        if reasons is None
        else GroupFailures(small_launch, take_reason=lambda: reasons.pop(0))
    )


def decisions(failures: GroupFailures, *errors: Exception) -> list[bool]:
    """Whether another worker group is started after each error."""
    answers = [failures.make_decision(WorkerGroupError("died", {0: error})) for error in errors]
    made_anew = [answer == FailureDecision.RETRY for answer in answers]
    assert made_anew == [notice.is_replaced for notice in failures.notices()]
    return made_anew


def test_groups_are_made_anew_as_often_as_the_launch_says(tmp_path: Path) -> None:
    assert decisions(failures_of(tmp_path, max_failures=2), BROKEN, LOST, BROKEN) == [True, True, False]
    retry = {"kinds": {"error": {"max_failures": 0}, "lost": {"max_failures": 2}}}  # counted alone
    limits = {"retry": retry, "max_failures": 1, "failures_left": {"error": 0, "lost": 2}}
    of_kinds = decisions(failures_of(tmp_path, **limits), LOST, LOST, OUT_OF_MEMORY, LOST)
    assert of_kinds == [True, True, True, False]
    assert decisions(failures_of(tmp_path, **limits), BROKEN) == [False]
    waits = {"kinds": {"out_of_memory": {"backoff": {"first_s": 60.0}}}}  # which leaves the cluster meanwhile
    assert decisions(failures_of(tmp_path, retry=waits, max_failures=3), LOST, OUT_OF_MEMORY) == [True, False]


def test_a_rank_that_the_driver_ended_was_hung(tmp_path: Path) -> None:
    kill_reason = "rank 0 was killed: no heartbeat"
    failures = failures_of(tmp_path, max_failures=3, reasons=[kill_reason, ""])
    decisions(failures, LOST, LOST)
    notices = [(notice.kind, notice.reason) for notice in failures.notices()]
    assert notices == [("hung", kill_reason), ("lost", "rank 0 was lost: its process died")]
    # The reason of a group that did not begin does not apply to the next.
    failures = failures_of(tmp_path, max_failures=3, reasons=[kill_reason, ""])
    assert failures.make_decision(ControllerError(WorkerGroupStartupTimeoutError(1))) == FailureDecision.RETRY
    decisions(failures, LOST)
    assert [notice.kind for notice in failures.notices()] == ["lost"]


def start_failure(cause: Exception) -> ControllerError:
    """Ray Train's error for a worker that died while its group started."""
    failure = WorkerGroupStartupFailedError("One of the worker actors failed to initialize.")
    failure.__cause__ = cause
    return ControllerError(failure)


def test_a_worker_that_dies_while_its_group_starts_spends_no_failure_and_is_told(tmp_path: Path) -> None:
    failures = failures_of(tmp_path, max_failures=0, reasons=["", "a worker was killed"])
    died = start_failure(RayActorError())
    assert [failures.make_decision(died) for _ in range(2)] == [FailureDecision.RETRY] * 2
    assert failures.notices() == [
        GroupFailure(f"a worker died while its group started: {RayActorError()}", "lost", True, at_start=True),
        GroupFailure("a worker was killed", "hung", True, at_start=True),
    ]


def test_a_preempted_node_spends_no_failure_and_is_told(tmp_path: Path) -> None:
    failures = failures_of(tmp_path, max_failures=0)
    preemption = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError(preempted=True))
    assert decisions(failures, preemption, preemption, LOST) == [True, True, False]
    assert [notice.preempted for notice in failures.notices()] == [True, True, False]
    assert "one of its nodes was preempted, so no failure is counted" in failures.notices()[0].reason


def test_what_cannot_be_put_in_words_is_no_error(tmp_path: Path) -> None:
    failures = failures_of(tmp_path, max_failures=1)
    assert failures.make_decision(WorkerGroupError("died", {})) == FailureDecision.RETRY
    assert failures.make_decision(WorkerGroupError("died", {0: Exception()})) == FailureDecision.RAISE
