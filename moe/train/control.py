"""Requests from outside to a run while it goes on."""

from abc import ABC, abstractmethod
from typing import Literal

Request = Literal["pause", "cancel"]
Ask = Request | Literal["finish"]
"""A request from outside, or `finish` once `train.max_duration` is over: rank 0 hands it to all ranks at a step."""


class Control(ABC):
    """Rank 0 asks it before every step; all ranks learn the answer from that step's all-reduce."""

    @abstractmethod
    def poll(self) -> Request | None:
        """Return what is asked for now, without waiting."""


class NoControl(Control):
    """Never asks for anything."""

    def poll(self) -> Request | None:
        return None
