"""Stopwatch for the parts of a longer computation."""

import time


class Clock:
    """Seconds spent on each part, summed over laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the time since the last lap as `name`."""
        now_s = time.perf_counter()
        self.laps[name] = round(self.laps.get(name, 0.0) + now_s - self._last, 3)
        self._last = now_s
