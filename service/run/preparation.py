"""Progress of data preparation, recorded every few seconds."""

import time
from collections.abc import Callable

from moe.records import PreparationRecord
from service.run.recorder import SpoolRecorder

INTERVAL_S = 2.0
"""Interval of progress records: at most 2000 short lines per hour."""


class PreparationProgress:
    """Callback that records progress, at most every `INTERVAL_S` per stage."""

    def __init__(self, recorder: SpoolRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._recorder, self._clock = recorder, clock
        self._began = clock()
        self._stage, self._next_at = "", 0.0

    def __call__(self, stage: str, share: float | None, num_done: int) -> None:
        now_s = self._clock()
        if stage == self._stage and now_s < self._next_at:
            return
        self._stage, self._next_at = stage, now_s + INTERVAL_S
        record = PreparationRecord(stage, share, num_done, round(now_s - self._began, 1))
        data = {"level": "info", "message": record.in_words(), "preparing": record.to_plain()}
        self._recorder.record("log", data)
