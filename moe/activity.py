"""Activities of this process's threads in the words of training, for a heartbeat that tells of them. No torch.

A rank that waits in a collective looks the same from outside whether another rank is slow, dead or frozen. What each
rank does, and how many activities it has begun, tells them apart.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal[
    "start", "preparation", "loading", "trials", "step", "collective", "checkpoint", "evaluation", "end"
]


@dataclass(frozen=True)
class Activity:
    """Part of a run that a thread is in."""

    phase: Phase
    detail: str = ""
    """Which of its kind, in words: a collective's name, a checkpoint's."""
    began_at: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.detail or self.phase


_activities: dict[int, list[Activity]] = {}
"""Activities of each thread, by its identifier, the innermost last."""
_num_begun = 0


@contextmanager
def doing(phase: Phase, detail: str = "") -> Iterator[None]:
    """The calling thread is in this part of a run until the block ends; such blocks may be nested."""
    global _num_begun
    thread = threading.get_ident()
    stack = _activities.setdefault(thread, [])
    stack.append(Activity(phase, detail))
    _num_begun += 1  # a lost update between threads costs nothing: any change is progress
    try:
        yield
    finally:
        stack.pop()
        _num_begun += 1
        if not stack:
            _activities.pop(thread, None)


def activities(thread: int) -> tuple[Activity, ...]:
    """Activities of a thread, the innermost last; none where it is in no part of a run."""
    return tuple(_activities.get(thread, ()))


def num_begun() -> int:
    """Activities that were begun and ended so far in all threads: a number that grows tells of progress."""
    return _num_begun
