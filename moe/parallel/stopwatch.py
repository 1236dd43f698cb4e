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
        self._add_finished()  # which then need no events

    def take(self) -> float:
        """Return and reset the accumulated seconds. On a GPU, intervals that are not over yet count in the next call:
        the host does not wait for them."""
        self._add_finished()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_finished(self) -> None:
        while self._events and self._events[0][1].query():
            start_event, end_event = self._events.popleft()
            self._seconds += start_event.elapsed_time(end_event) / 1e3
