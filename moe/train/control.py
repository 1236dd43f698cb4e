"""Pause and cancel requests to a running job."""

from abc import ABC, abstractmethod
from typing import Literal

Request = Literal["pause", "cancel"]
RequestedAction = Request | Literal["finish"]
"""External request, or `finish` once `train.max_duration` is over."""


class Control(ABC):
    """Source of requests, polled by rank 0 before every step; all ranks learn of them in the step's all-reduce."""

    @abstractmethod
    def poll(self) -> Request | None:
        """Return the current request, without waiting."""


class NoControl(Control):
    """Never requests anything."""

    def poll(self) -> Request | None:
        return None
