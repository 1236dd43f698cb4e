"""Time spent on a device, accumulated without synchronization."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe.parallel.accelerator import accelerator


class Stopwatch:
    """Accumulates the time of `running()` blocks: wall-clock time on a CPU, time of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._timer = accelerator(device).timer
        self._seconds = 0.0
        self._events: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        first, last = self._timer(), self._timer()
        if first is None or last is None:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        events = first, last
        first.record()
        yield
        last.record()
        self._events.append(events)
        while self._events and self._events[0][1].query():  # finished intervals need no events
            self._add(*self._events.popleft())

    def take(self) -> float:
        """Return and reset the accumulated seconds. Synchronizes with a GPU."""
        while self._events:
            self._events[0][1].synchronize()
            self._add(*self._events.popleft())
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self, start_event: Any, end_event: Any) -> None:
        self._seconds += start_event.elapsed_time(end_event) / 1e3
