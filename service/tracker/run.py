"""Contract of all trackers: a run, which is a job in one tracker."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from service.tracker.messages import RunEnd, TrackedRun
from service.tracker.values import StepValues


class TrackerRun(ABC):
    """A run in a tracker. Methods are called by one thread, and raise whatever the tracker's library raises; the run is
    then opened anew, and the call repeated."""

    is_of_process = False
    """Whether the library can open a run once in a process, so that an error needs a new one."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.last_step: int | None = None
        """Last step that the tracker has, after `open`."""

    @abstractmethod
    def open(self) -> str:
        """Begin the run, or continue it; returns its URL or folder. Sets `last_step`."""

    @abstractmethod
    def write(self, points: Sequence[StepValues]) -> None:
        """Write steps in order, completely or up to a step that `open` reports."""

    @abstractmethod
    def write_system(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write the use of devices at a step, once."""

    @abstractmethod
    def set_waiting(self, waiting: bool) -> None:
        """Show whether the job holds no workers, where the tracker has a state for that."""

    @abstractmethod
    def end(self, end: RunEnd) -> None:
        """Write scores and the final status."""

    @abstractmethod
    def close(self) -> None:
        """Release resources; the run is not ended."""


class RewindableRun(TrackerRun):
    """Contract of trackers that can remove values: repeated steps show their new ones."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """Remove the values of `step` and later ones."""


class AppendOnlyRun(TrackerRun):
    """Contract of trackers that cannot remove values: repeated steps keep their first ones."""

    @abstractmethod
    def note_repeated(self, steps: str) -> None:
        """Record in the run which repeated steps keep their first values."""
