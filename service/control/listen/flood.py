"""A bound on what can be written to the log, however often its cause comes."""

import logging
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

LINES_A_MINUTE = 20
"""Lines of one kind that are logged in a minute."""
MAX_KINDS = 256


class FloodGate:
    """Lets through the first lines of a kind each minute. The next line says how many were left out.

    Only warnings and worse: what is told of ordinary work, no stranger can cause.
    """

    def __init__(
        self, lines_a_minute: int = LINES_A_MINUTE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_lines, self._clock = lines_a_minute, clock
        self._kinds: dict[str, tuple[float, int]] = {}
        """Since when, and how many since."""

    def left_out(self, kind: str) -> int | None:
        """None for a line that is one too many, else how many were left out before it."""
        now = self._clock()
        since, count = self._kinds.pop(kind, (now, 0))
        left_out = 0
        if now - since >= 60:
            left_out = max(0, count - self._max_lines)
            since, count = now, 0
        self._kinds[kind] = since, count + 1
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return left_out if count < self._max_lines else None

    def __call__(
        self, _logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Processor of structlog."""
        if method in ("debug", "info"):
            return event
        left_out = self.left_out(str(event.get("event")))
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event

    def filter(self, record: logging.LogRecord) -> bool:
        """Filter of the standard library's loggers, which libraries use."""
        if record.levelno < logging.WARNING:
            return True
        # Compare the first line: the rest names sockets and tasks, which differ every time.
        left_out = self.left_out(f"{record.name} {str(record.msg).partition(chr(10))[0]}")
        if left_out:
            record.msg = f"{record.msg} ({left_out} more like it were left out)"
        return left_out is not None
