"""Requests under one key, one after the other: a repeat waits for the first, and then has its answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from service.control.errors import Unavailable

MAX_WAITING = 4
"""At a time, of all keys: each holds a thread that other requests want too."""


class KeyedLock:
    """Lock with one holder per key. Safe to share between threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._held_keys: set[tuple[str, str]] = set()
        self.num_waiting = 0

    @contextmanager
    def acquire(self, key: tuple[str, str]) -> Iterator[None]:
        """The turn of this key, when nobody else has it. Raises Unavailable where enough others wait."""
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
                "a request with this Idempotency-Key is being worked on, and others wait for theirs; "
                "send it again later, with the same key",
                headers={"retry-after": "10"},
            )
        self.num_waiting += 1
        try:
            self._condition.wait_for(lambda: key not in self._held_keys)
        finally:
            self.num_waiting -= 1
