"""Current activities of this process's threads, for heartbeats. No torch.

A rank that waits in a collective looks the same whether another rank is slow, dead or frozen; each rank's activity,
and the number begun, tell these apart.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["start", "preparation", "loading", "trials", "step", "collective", "checkpoint", "evaluation", "end"]


@dataclass(frozen=True)
class Activity:
    """Part of a run that a thread executes."""

    phase: Phase
    detail: str = ""
    """Instance for display: name of a collective, name of a checkpoint."""
    began_at: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return self.detail or self.phase


_activities: dict[int, list[Activity]] = {}
"""Stack of activities by thread identifier, innermost last."""
_assistants: dict[int, int] = {}
"""Identifier of a thread that works for another, by the other's identifier."""
_num_begun = 0


@contextmanager
def doing(phase: Phase, detail: str = "") -> Iterator[None]:
    """Mark the calling thread as in this phase until the block ends; blocks may be nested."""
    global _num_begun
    thread = threading.get_ident()
    stack = _activities.setdefault(thread, [])
    stack.append(Activity(phase, detail))
    _num_begun += 1  # a lost update between threads is harmless: any change is progress
    try:
        yield
    finally:
        stack.pop()
        _num_begun += 1
        if not stack:
            _activities.pop(thread, None)


@contextmanager
def assisting(thread: int) -> Iterator[None]:
    """Count the calling thread's activities as those of `thread` too until the block ends. `thread` has one assistant
    at a time."""
    _assistants[thread] = threading.get_ident()
    try:
        yield
    finally:
        del _assistants[thread]


def activities(thread: int) -> tuple[Activity, ...]:
    """Activities of a thread and of its assistant, the latest last; empty if it is in no part of a run."""
    own = _activities.get(thread, ())
    assistant = _assistants.get(thread)
    if assistant is None:
        return tuple(own)
    return tuple(sorted((*own, *_activities.get(assistant, ())), key=lambda activity: activity.began_at))


def num_begun() -> int:
    """Number of activity changes in all threads: it grows while the process makes progress."""
    return _num_begun
