"""Pause and cancel requests to a running job."""

from abc import ABC, abstractmethod
from typing import Literal

Request = Literal["pause", "cancel"]
Ask = Request | Literal["finish"]
"""External request, or `finish` once `train.max_duration` is over; rank 0 passes it to all ranks at a step."""


class Control(ABC):
    """Source of requests: rank 0 polls it before every step; all ranks get the answer in that step's all-reduce."""

    @abstractmethod
    def poll(self) -> Request | None:
        """Return the current request, without waiting."""


class NoControl(Control):
    """Never requests anything."""

    def poll(self) -> Request | None:
        return None
