"""Rate limit of log lines."""

import logging
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

LINES_A_MINUTE = 20
"""Maximum number of logged lines of one kind per minute."""
MAX_KINDS = 256


class LogRateLimit:
    """Passes the first warnings and errors of each kind per minute; the next line says how many were dropped.
    Strangers cannot cause other lines."""

    def __init__(self, lines_a_minute: int = LINES_A_MINUTE, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_lines, self._clock = lines_a_minute, clock
        self._kinds: dict[str, tuple[float, int]] = {}
        """(start of the minute, lines since)."""

    def left_out(self, kind: str) -> int | None:
        """Lines dropped before this one; None to drop it."""
        now_s = self._clock()
        since, count = self._kinds.pop(kind, (now_s, 0))
        left_out = 0
        if now_s - since >= 60:
            left_out = max(0, count - self._max_lines)
            since, count = now_s, 0
        self._kinds[kind] = since, count + 1
        if len(self._kinds) > MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return left_out if count < self._max_lines else None

    def __call__(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """structlog processor."""
        if method in ("debug", "info"):
            return event
        left_out = self.left_out(str(event.get("event")))
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event

    def filter(self, record: logging.LogRecord) -> bool:
        """Filter for standard library loggers, which libraries use."""
        if record.levelno < logging.WARNING:
            return True
        # The first line is the kind: the rest names sockets and tasks, which always differ.
        left_out = self.left_out(f"{record.name} {str(record.msg).partition(chr(10))[0]}")
        if left_out:
            record.msg = f"{record.msg} ({left_out} similar messages suppressed)"
        return left_out is not None
