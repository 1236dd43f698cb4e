"""Ray Train failure policy of the driver, in whose process the controller runs: decides whether a dead worker group
is restarted, and keeps a notice of each death."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import WorkerGroupError

from moe.spec import FailureKind
from service.run.lost_nodes import describe_lost_ranks
from service.wire.launch import Launch

MAX_REASON = 500
_OUT_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
"""Names of out-of-memory exceptions of torch, Ray and Python."""

_log = logging.getLogger("service.run.driver")


@dataclass(frozen=True)
class GroupFailure:
    """Death of a worker group."""

    reason: str
    kind: FailureKind
    is_replaced: bool
    """Whether Ray Train starts another group; if not, the attempt ends."""
    preempted: bool = False
    """Whether one of its nodes was preempted, which counts as no failure."""
    at_start: bool = False
    """Whether a worker died before the group had started, which counts as no failure."""


class GroupFailures(FailurePolicy):
    """Decides on dead worker groups by the job's retry rules."""

    def __init__(
        self,
        launch: Launch,
        take_reason: Callable[[], str] = lambda: "",
        explain_loss: Callable[[frozenset[int]], str] = describe_lost_ranks,
    ) -> None:
        """`take_reason`: called at each group's death; returns why this driver killed workers, or "".
        `explain_loss`: names what a group with these dead ranks has lost, or returns ""."""
        super().__init__(FailureConfig(max_failures=launch.max_failures))
        self._default_policy = DefaultFailurePolicy(self.failure_config)
        """Handles other failures: it restarts a group that is not placed in time, or loses a worker while it starts."""
        self._launch, self._take_reason, self._explain_loss = launch, take_reason, explain_loss
        self._num_left = {"": launch.max_failures, **launch.failures_left}
        self._notices: list[GroupFailure] = []
        self._lock = threading.Lock()

    def notices(self) -> list[GroupFailure]:
        """Notices of all deaths so far."""
        with self._lock:
            return list(self._notices)

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """Called by Ray Train after a failure."""
        end_reason = self._take_reason()  # also for a group that was not placed: it explains no later death
        is_preempted = _is_preemption_failure(training_failed_error)
        if isinstance(training_failed_error, WorkerGroupError):
            kind, words = self._judge(training_failed_error.worker_failures, end_reason)
        else:
            if (death := _death_at_start(training_failed_error)) is not None:
                kind, words = ("hung", end_reason) if end_reason else ("lost", _describe_start(death))
                self._add(GroupFailure(words, kind, is_replaced=True, at_start=True))
            return self._default_policy.make_decision(training_failed_error)
        if is_preempted:  # replaced however often this happens
            words = f"{words}; one of its nodes was preempted, so no failure is counted"
        restarts = is_preempted or self._use_restart(kind)
        _log.info("worker group died (%s): %s", kind, words, exc_info=training_failed_error)
        self._add(GroupFailure(words, kind, restarts, is_preempted))
        return FailureDecision.RETRY if restarts else FailureDecision.RAISE

    def _add(self, notice: GroupFailure) -> None:
        with self._lock:
            self._notices.append(notice)

    def _judge(self, errors: dict[int, Exception], end_reason: str) -> tuple[FailureKind, str]:
        """(kind, reason) of a group's death. A lost node or process, or any other error, takes precedence over the
        broken collectives that follow from it. `end_reason`: why this driver killed workers, or ""."""
        if end_reason:
            return "hung", end_reason
        kind = kind_of(errors)
        if kind != "out_of_memory" and (kind == "lost" or all(map(_is_broken_collective, errors.values()))):
            dead_ranks = frozenset(rank for rank, error in errors.items() if _in_words(error) is None)
            if loss := self._explain_loss(dead_ranks):
                return "lost", loss
        return kind, reason(errors)

    def _use_restart(self, kind: FailureKind) -> bool:
        """Use one restart of this attempt's budget; False if none is left, or if the control plane restarts after a
        backoff."""
        if self._launch.spec.retry.backoff_of(kind) is not None:
            return False  # the control plane waits, without holding workers
        budget = kind if kind in self._num_left else ""
        self._num_left[budget] -= 1
        return self._num_left[budget] >= 0


def _death_at_start(error: Any) -> BaseException | None:
    """Death of a worker process while its group started; None for other failures."""
    failure = getattr(error, "controller_failure", None)
    return failure.__cause__ or failure if isinstance(failure, WorkerGroupStartupFailedError) else None


def _describe_start(death: BaseException) -> str:
    lines = [line for line in str(death).splitlines() if line and not line[0].isspace()]  # without the actor's ids
    return f"a worker died while its group started: {' '.join(lines)}"[:MAX_REASON]


def kind_of(errors: dict[int, Exception]) -> FailureKind:
    """Kind of failure that killed a group."""
    names = {kind.__name__ for error in errors.values() for kind in type(_cause_of(error)).__mro__}
    if names & _OUT_OF_MEMORY:
        return "out_of_memory"
    return "lost" if any(_in_words(error) is None for error in errors.values()) else "error"


def reason(errors: dict[int, Exception]) -> str:
    """Reason of the death of a group that lost no process: its first error that is not a broken collective."""
    if not errors:
        return "its workers failed without a message"
    out_of_memory = {rank: error for rank, error in errors.items() if kind_of({rank: error}) == "out_of_memory"}
    causes = {rank: error for rank, error in errors.items() if not _is_broken_collective(error)}
    rank, error = min((out_of_memory or causes or errors).items())
    return f"rank {rank} failed: {_in_words(error)}"[:MAX_REASON]


def _is_broken_collective(error: Exception) -> bool:
    return type(_cause_of(error)).__name__ == "CollectiveError"


def _cause_of(error: Exception) -> Any:
    # Ray wraps causes: a dead actor in a failed health check, a worker's exception in its traceback.
    return getattr(error, "health_check_failure", None) or getattr(error, "_base_exc", None) or error


def _in_words(error: Exception) -> str | None:
    """Description of an error; None for a process that died."""
    cause = _cause_of(error)
    if any(kind.__name__ == "RayActorError" for kind in type(cause).__mro__):
        return None
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text.splitlines()[0] if text else 'no message'}"
