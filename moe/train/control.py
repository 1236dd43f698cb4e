"""Pause and cancel requests to a running job, and notices that a rank's node is about to end."""

from abc import ABC, abstractmethod
from typing import Literal

Request = Literal["pause", "cancel"]
RequestedAction = Request | Literal["finish"]
"""External request, or `finish` once `train.max_duration` is over."""
EndingAction = RequestedAction | Literal["preempt"]
"""The same, or `preempt`: commit a checkpoint and end, because a rank's node is about to end."""


class Control(ABC):
    """Source of requests, polled by rank 0 before every step; all ranks learn of them in the step's all-reduce."""

    @abstractmethod
    def poll(self) -> Request | None:
        """Return the current request, without waiting."""

    def is_preempted(self) -> bool:
        """Whether this rank's node is about to end, without waiting; asked on every rank before every step."""
        return False


class NoControl(Control):
    """Never requests anything."""

    def poll(self) -> Request | None:
        return None
