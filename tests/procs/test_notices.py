"""Why a worker group died, which kind of failure that was, and whether another group is made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from service.run.notices import GroupFailures, kind_of, reason
from service.wire.launch import Launch
from tests.procs.launching import launch

BROKEN = UserExceptionWithTraceback(RuntimeError("Connection closed by peer\nand more"), "a traceback")
LOST = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError())
OUT_OF_MEMORY = UserExceptionWithTraceback(torch.OutOfMemoryError("CUDA out of memory"), "a traceback")


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        ({0: BROKEN, 1: LOST}, "lost", "rank 1 was lost: its process died"),
        ({0: BROKEN}, "error", "rank 0 failed: RuntimeError: Connection closed by peer"),
        ({0: BROKEN, 3: OUT_OF_MEMORY}, "out_of_memory", "rank 3 failed: OutOfMemoryError: CUDA out of memory"),
        ({1: LOST, 3: OUT_OF_MEMORY}, "out_of_memory", "rank 3 failed: OutOfMemoryError: CUDA out of memory"),
        ({0: MemoryError()}, "out_of_memory", "rank 0 failed: MemoryError: no message"),
    ],
)
def test_causes_are_named_before_what_they_broke(errors: dict[int, Any], kind: str, words: str) -> None:
    assert (kind_of(errors), reason(errors)) == (kind, words)


def decisions(failures: GroupFailures, *errors: Exception) -> list[bool]:
    """Whether another group is made after each error."""
    answers = [failures.make_decision(WorkerGroupError("died", {0: error})) for error in errors]
    assert [answer == FailureDecision.RETRY for answer in answers] == [
        notice.is_made_anew for notice in failures.notices()
    ]
    return [answer == FailureDecision.RETRY for answer in answers]


def with_retry(tmp_path: Path, retry: dict[str, Any], **changes: Any) -> Launch:
    return launch(tmp_path, retry=retry).model_copy(update=changes)


def test_groups_are_made_anew_as_often_as_the_launch_says(tmp_path: Path) -> None:
    failures = GroupFailures(with_retry(tmp_path, {}, max_failures=2))
    assert decisions(failures, BROKEN, LOST, BROKEN) == [True, True, False]


def test_kinds_with_a_limit_of_their_own_are_counted_alone(tmp_path: Path) -> None:
    retry = {"kinds": {"error": {"max_failures": 0}, "lost": {"max_failures": 2}}}
    given = with_retry(tmp_path, retry, max_failures=1, failures_left={"error": 0, "lost": 2})
    assert decisions(GroupFailures(given), LOST, LOST, OUT_OF_MEMORY, LOST) == [True, True, True, False]
    assert decisions(GroupFailures(given), BROKEN) == [False]


def test_what_is_to_wait_leaves_the_cluster(tmp_path: Path) -> None:
    given = with_retry(tmp_path, {"kinds": {"out_of_memory": {"backoff": {"first_s": 60.0}}}}, max_failures=3)
    assert decisions(GroupFailures(given), LOST, OUT_OF_MEMORY) == [True, False]


def test_a_rank_that_the_driver_ended_was_hung(tmp_path: Path) -> None:
    reasons = ["rank 0 was killed: no heartbeat", ""]
    failures = GroupFailures(with_retry(tmp_path, {}, max_failures=3), take_reason=lambda: reasons.pop(0))
    decisions(failures, LOST, LOST)
    assert [(notice.kind, notice.reason) for notice in failures.notices()] == [
        ("hung", "rank 0 was killed: no heartbeat"), ("lost", "rank 0 was lost: its process died"),
    ]  # fmt: skip


def test_a_preempted_node_spends_no_failure_and_is_told(tmp_path: Path) -> None:
    failures = GroupFailures(with_retry(tmp_path, {}, max_failures=0))
    taken = WorkerHealthCheckFailedError("A worker health check failed.", RayActorError(preempted=True))
    assert decisions(failures, taken, taken, LOST) == [True, True, False]
    assert [notice.preempted for notice in failures.notices()] == [True, True, False]
    assert "one of its nodes was preempted, so no failure is counted" in failures.notices()[0].reason


def test_why_ranks_of_a_group_that_did_not_begin_were_ended_is_no_reason_for_the_next(tmp_path: Path) -> None:
    reasons = ["rank 0 was killed: no heartbeat", ""]
    failures = GroupFailures(with_retry(tmp_path, {}, max_failures=3), take_reason=lambda: reasons.pop(0))
    error = ControllerError(WorkerGroupStartupTimeoutError(1))
    assert failures.make_decision(error) == FailureDecision.RETRY
    decisions(failures, LOST)
    assert [notice.kind for notice in failures.notices()] == ["lost"]


def test_what_cannot_be_put_in_words_is_no_error(tmp_path: Path) -> None:
    failures = GroupFailures(with_retry(tmp_path, {}, max_failures=1))
    assert failures.make_decision(WorkerGroupError("died", {})) == FailureDecision.RETRY
    assert failures.make_decision(WorkerGroupError("died", {0: Exception()})) == FailureDecision.RAISE
