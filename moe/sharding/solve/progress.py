"""Progress of a plan that takes longer than a moment, on standard error."""

import sys
import threading
import time
from types import TracebackType

AFTER_S = 5.0
"""Seconds after which the first line appears."""
EVERY_S = 10.0
"""Seconds between lines."""


class PlanningProgress:
    """Context that prints a line every `every_s` seconds, once planning has taken longer than `after_s`."""

    def __init__(self, after_s: float = AFTER_S, every_s: float = EVERY_S) -> None:
        self._after_s, self._every_s = after_s, every_s
        self._stage, self._began = "capturing the module", time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._print, name="progress of planning", daemon=True)

    def set_stage(self, stage: str) -> None:
        """Set the stage that the next line names."""
        self._stage = stage

    def __enter__(self) -> "PlanningProgress":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _print(self) -> None:
        pause_s = self._after_s
        while not self._end.wait(pause_s):
            print(f"planning for {time.monotonic() - self._began:.0f} s: {self._stage}", file=sys.stderr, flush=True)
            pause_s = self._every_s
