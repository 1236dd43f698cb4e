"""Steps of a run whose records the host has not read."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from moe.parallel import Layout
from moe.parallel.accelerator import accelerator
from moe.records import StepRecord
from moe.tasks.task import RankBatch
from moe.train.step import StepResult


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the host has launched."""

    result: StepResult
    batch: RankBatch[Any]
    began: float
    """`time.perf_counter()`"""
    data_s: float


class UnreadSteps:
    """Steps in order. A GPU's record is read when the next step is launched, so that the GPU never waits for the host;
    a CPU's at once."""

    def __init__(self, layout: Layout) -> None:
        self._max_unread = int(accelerator(layout.device).runs_ahead)
        self._steps: deque[LaunchedStep] = deque()
        self._last_read = float("-inf")

    def add(self, step: LaunchedStep) -> None:
        self._steps.append(step)

    def read(self, *, reads_all: bool) -> Iterator[tuple[StepRecord, RankBatch[Any]]]:
        """Yield records with timings, and batches, of all steps or of all but the last."""
        while len(self._steps) > (0 if reads_all else self._max_unread):
            step = self._steps.popleft()
            record = step.result.record  # waits for the step
            now = time.perf_counter()
            step_s = now - max(step.began, self._last_read)
            self._last_read = now
            yield _with_timing(record, step_s, step.data_s), step.batch


def _with_timing(record: StepRecord, step_s: float, data_s: float) -> StepRecord:
    return replace(
        record,
        step_s=step_s,
        tokens_per_s=(record.tokens or 0) / step_s,
        data_s=data_s,
        time=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
    )
