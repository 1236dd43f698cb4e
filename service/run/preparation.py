"""Progress of preparing data, recorded every few seconds."""

import time
from collections.abc import Callable

from moe.records import PreparationRecord
from service.run.recorder import SpoolRecorder

INTERVAL_S = 2.0
"""Interval between records of progress: an hour's preparation leaves two thousand short lines at most."""


class PreparationProgress:
    """Records how far a preparation has come: a call at any moment, a record every other second."""

    def __init__(self, recorder: SpoolRecorder, now: Callable[[], float] = time.monotonic) -> None:
        self._recorder, self._now = recorder, now
        self._began = now()
        self._stage, self._next_at = "", 0.0

    def __call__(self, stage: str, share: float | None, num_done: int) -> None:
        now = self._now()
        if stage == self._stage and now < self._next_at:
            return
        self._stage, self._next_at = stage, now + INTERVAL_S
        record = PreparationRecord(stage, share, num_done, round(now - self._began, 1))
        data = {"level": "info", "message": record.in_words(), "preparing": record.to_plain()}
        self._recorder.record("log", data)
