"""Seconds that something took on a device, added up without making the device wait."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up what is done within `running()`: wall-clock time on a CPU, the current stream's time on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._events.append(events)
        while self._events and self._events[0][1].query():  # what is over needs no events any more
            self._add(*self._events.popleft())

    def take(self) -> float:
        """Seconds since the last `take`. On a GPU it waits for what was measured."""
        while self._events:
            self._events[0][1].synchronize()
            self._add(*self._events.popleft())
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._seconds += begun.elapsed_time(ended) / 1e3
