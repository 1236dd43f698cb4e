"""Seconds of a longer piece of work, by its parts."""

import time


class Clock:
    """Seconds spent on each part of the work, added up over laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Counts the time since the last lap as spent on `name`."""
        now = time.perf_counter()
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self._last, 3)
        self._last = now
