"""Signals between ranks, exchanged in every step."""

from dataclasses import dataclass

from moe.parallel import json_collectives
from moe.train.control import EndingAction, RequestedAction

_REQUESTS: tuple[RequestedAction | None, ...] = (None, "pause", "cancel", "finish")


@dataclass(frozen=True)
class Signals:
    """Signals summed over ranks in every step, so that all ranks act on them at the same step.

    Only rank 0 sets `request`; the counts are of ranks.
    """

    request: RequestedAction | None = None
    num_saved: int = 0
    num_save_failed: int = 0
    num_graphs_failed: int = 0
    """Ranks that could not record a graph of a micro-batch."""
    num_preempted: int = 0
    """Ranks whose node is about to end."""

    @property
    def action(self) -> EndingAction | None:
        """Action that ends the run after this step; None to continue."""
        return self.request or ("preempt" if self.num_preempted else None)

    def to_numbers(self) -> list[float]:
        counts = (self.num_saved, self.num_save_failed, self.num_graphs_failed, self.num_preempted)
        return [_REQUESTS.index(self.request), *counts]

    @classmethod
    def from_numbers(cls, numbers: list[float]) -> "Signals":
        request, *counts = (int(number) for number in numbers)
        return cls(_REQUESTS[request], *counts)

    def all_reduce_sum(self) -> "Signals":
        """Sum over all ranks, by the hosts alone: no device is waited for. Collective."""
        return self.from_numbers(json_collectives.all_reduce_sum(*self.to_numbers()))
