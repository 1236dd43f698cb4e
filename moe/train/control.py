"""Requests from outside to a run while it goes on."""

from abc import ABC, abstractmethod
from typing import Literal

Request = Literal["pause", "cancel"]
Ask = Request | Literal["finish"]
"""What rank 0 asks of all ranks at a step: a request from outside, or to finish since `train.max_duration` is over."""


class Control(ABC):
    """Rank 0 asks it before every step; all ranks learn the answer from that step's all-reduce."""

    @abstractmethod
    def requested(self) -> Request | None:
        """Return what is asked for now, without waiting."""


class NoControl(Control):
    """Never asks for anything."""

    def requested(self) -> Request | None:
        return None
