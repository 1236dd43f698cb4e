"""Passes new events to open streams without a query per stream. Everything runs on the event loop's thread, except
`publish` and `close`. A cache only: a stream that finds a gap reads the store."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from service.control.report.event_text import WireEvent

TAIL_EVENTS = 256
TAIL_CHARS = 1_000_000


class Hub:
    """Newest events of every job with a stream."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tails: dict[str, Tail] = {}
        self.is_closed = False

    @property
    def num_streams(self) -> int:
        return sum(tail.num_streams for tail in self._tails.values())

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close(self) -> None:
        """End every stream; clients reconnect with their last id. Callable from any thread."""
        self.is_closed = True
        self._call(self._wake_all)

    def publish(self, job_id: str, events: Sequence[WireEvent]) -> None:
        """Send stored events to streams. Callable from any thread."""
        if events:
            self._call(self._publish, job_id, events)

    @contextmanager
    def follow(self, job_id: str) -> Iterator["Tail"]:
        tail = self._tails.setdefault(job_id, Tail())
        tail.num_streams += 1
        try:
            yield tail
        finally:
            tail.num_streams -= 1
            if tail.num_streams == 0:
                self._tails.pop(job_id, None)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        with suppress(RuntimeError):  # the loop has just closed, with its streams
            self._loop.call_soon_threadsafe(function, *arguments)

    def _publish(self, job_id: str, events: Sequence[WireEvent]) -> None:
        if (tail := self._tails.get(job_id)) is not None:
            tail.extend(events)

    def _wake_all(self) -> None:
        for tail in self._tails.values():
            tail.wake()


class Tail:
    """Newest events of one job, consecutive; bounded, however slowly a stream reads."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.version = 0
        """Incremented whenever streams are woken."""
        self._events: deque[WireEvent] = deque()
        self._chars = 0
        self._news = asyncio.Event()

    def extend(self, events: Sequence[WireEvent]) -> None:
        for event in events:
            if self._events and event.id <= self._events[-1].id:
                continue
            if self._events and event.id != self._events[-1].id + 1:
                # Two transactions were published in reverse order; the missing events come from the store.
                self._events.clear()
                self._chars = 0
            self._events.append(event)
            self._chars += len(event.json)
            while len(self._events) > TAIL_EVENTS or self._chars > TAIL_CHARS:
                self._chars -= len(self._events.popleft().json)
        self.wake()

    def after(self, last_id: int) -> list[WireEvent] | None:
        """Events after `last_id`; None if this does not reach back that far."""
        if not self._events or self._events[0].id > last_id + 1:
            return None
        return [event for event in self._events if event.id > last_id]

    def wake(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, version: int, timeout_s: float) -> bool:
        """Wait until `self.version` exceeds `version`; False on timeout."""
        if self.version > version:
            return True
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
