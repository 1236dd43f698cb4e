"""Serializes requests with the same key, so that a repeated one gets the first one's answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from service.control.errors import Unavailable

MAX_WAITING = 4
"""Maximum number of waiting requests over all keys, since every one occupies a thread."""


class KeyedLock:
    """Lock with one holder per key. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._held_keys: set[tuple[str, str]] = set()
        self.num_waiting = 0

    @contextmanager
    def acquire(self, key: tuple[str, str]) -> Iterator[None]:
        """Hold the key's lock. Raises Unavailable if too many wait."""
        with self._condition:
            if key in self._held_keys:
                self._wait(key)
            self._held_keys.add(key)
        try:
            yield
        finally:
            with self._condition:
                self._held_keys.remove(key)
                self._condition.notify_all()

    def _wait(self, key: tuple[str, str]) -> None:
        if self.num_waiting == MAX_WAITING:
            raise Unavailable(
                "another request with this Idempotency-Key is in progress and others are queued; "
                "repeat it later with the same key",
                headers={"retry-after": "10"},
            )
        self.num_waiting += 1
        try:
            self._condition.wait_for(lambda: key not in self._held_keys)
        finally:
            self.num_waiting -= 1
