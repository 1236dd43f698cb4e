"""Predicted seconds of a unit, by kind."""

from operator import add
from typing import NamedTuple


class UnitSeconds(NamedTuple):
    """Seconds of one unit for one micro-batch, forward and backward."""

    products_s: float = 0.0
    attention_s: float = 0.0
    routing_s: float = 0.0
    elementwise_s: float = 0.0
    launches_s: float = 0.0
    all_to_all_s: float = 0.0
    gather_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.busy_s + self.all_to_all_s + self.gather_s

    @property
    def busy_s(self) -> float:
        """Computation and launches, which collectives can overlap with."""
        return self.products_s + self.attention_s + self.routing_s + self.elementwise_s + self.launches_s

    def plus(self, other: "UnitSeconds") -> "UnitSeconds":
        return UnitSeconds(*map(add, self, other))


KINDS = UnitSeconds._fields
