"""Recorder of a run's steps: one call a step, which must return at once."""

from abc import ABC, abstractmethod
from typing import Any, Literal

from moe.records import CheckpointRecord, StepRecord

Level = Literal["debug", "info", "warning", "error"]


class Recorder(ABC):
    """Takes what a run reports. Rank 0 records metrics and checkpoints; every rank may log."""

    @abstractmethod
    def metric(self, record: StepRecord) -> None:
        """Take the record of one finished step."""

    @abstractmethod
    def record_resume(self, step: int, checkpoint: str | None) -> None:
        """Take the news that training goes on after `step` steps, from a checkpoint that is loaded; from the start
        where there is none."""

    @abstractmethod
    def checkpoint(self, record: CheckpointRecord) -> None:
        """Take the news that a checkpoint is committed."""

    @abstractmethod
    def checkpoint_failed(self, step: int, reason: str) -> None:
        """Take the news that the checkpoint of `step` could not be written, or not by all ranks, and was given up."""

    @abstractmethod
    def log(self, level: Level, message: str, **fields: Any) -> None:
        """Take a line for people to read: a decision and its reason."""

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever the recorder holds; nothing is recorded afterwards."""


class MemoryRecorder(Recorder):
    """Keeps everything in lists, for notebooks and tests."""

    def __init__(self) -> None:
        self.metrics: list[StepRecord] = []
        self.checkpoints: list[CheckpointRecord] = []
        self.failed_checkpoints: list[dict[str, Any]] = []
        self.logs: list[dict[str, Any]] = []
        self.resumed_at: tuple[int, str | None] | None = None

    def record_resume(self, step: int, checkpoint: str | None) -> None:
        self.resumed_at = (step, checkpoint)

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
