"""Recorder of a run's metrics, checkpoints and logs. Its methods must not block."""

from abc import ABC, abstractmethod
from typing import Any, Literal

from moe.records import CheckpointRecord, StepRecord

Level = Literal["debug", "info", "warning", "error"]
FinishActivity = Literal["saving", "evaluating"]


class Recorder(ABC):
    """Receives a run's records. Rank 0 records metrics and checkpoints; every rank may log."""

    @abstractmethod
    def metric(self, record: StepRecord) -> None:
        """Record one finished step."""

    @abstractmethod
    def record_resume(self, step: int, checkpoint: str | None) -> None:
        """Record that training continues after `step` steps, from a loaded checkpoint or from the start."""

    @abstractmethod
    def record_finish(self, step: int, activity: FinishActivity) -> None:
        """Record what follows the last step, `step`, as it begins."""

    @abstractmethod
    def checkpoint(self, record: CheckpointRecord) -> None:
        """Record that a checkpoint was committed."""

    @abstractmethod
    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Record that the checkpoint of `step` failed on some rank and was given up."""

    @abstractmethod
    def log(self, level: Level, message: str, **fields: Any) -> None:
        """Record a log line: a decision and its reason."""

    @abstractmethod
    def close(self) -> None:
        """Release resources; nothing is recorded afterwards."""


class MemoryRecorder(Recorder):
    """Keeps all records in lists, for notebooks and tests."""

    def __init__(self) -> None:
        self.metrics: list[StepRecord] = []
        self.checkpoints: list[CheckpointRecord] = []
        self.failed_checkpoints: list[dict[str, Any]] = []
        self.logs: list[dict[str, Any]] = []
        self.resumed_at: tuple[int, str | None] | None = None
        self.finish: list[tuple[int, FinishActivity]] = []

    def record_resume(self, step: int, checkpoint: str | None) -> None:
        self.resumed_at = (step, checkpoint)

    def record_finish(self, step: int, activity: FinishActivity) -> None:
        self.finish.append((step, activity))

    def metric(self, record: StepRecord) -> None:
        self.metrics.append(record)

    def checkpoint(self, record: CheckpointRecord) -> None:
        self.checkpoints.append(record)

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self.failed_checkpoints.append({"step": step, "reason": reason})

    def log(self, level: Level, message: str, **fields: Any) -> None:
        self.logs.append({"level": level, "message": message, **fields})

    def close(self) -> None:
        pass
