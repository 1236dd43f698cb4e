"""Numbers that the fullest rank has of parameters, gradients and the optimizer's state, counted weight by weight."""

from dataclasses import dataclass
from functools import cache
from math import prod

from moe.plan.cost.stages import stages
from moe.plan.cost.units import Unit, units
from moe.plan.degrees import Degrees, Shards
from moe.plan.profile import profile_of
from moe.spec import ModelSpec, OptimizerSpec


@dataclass(frozen=True)
class Elements:
    """Number of elements of parameters, those of experts apart."""

    dense: int
    in_experts: int

    @property
    def both(self) -> int:
        return self.dense + self.in_experts


@dataclass(frozen=True)
class State:
    """Elements and bytes of some units' parameters on the fullest rank, exactly."""

    stored: Elements
    """Cut up over data ranks."""
    used: Elements
    """As they are used: what is sharded over data ranks counts as it is gathered."""
    gathered: Elements
    """Of those, what FSDP has at a time: two layers, the one at work and the next, and what lies in none."""
    in_layers: int
    """Of those used, what lies in layers."""
    largest_layer: int
    largest: Elements
    """Of any layer: the most outside experts, and the most in them."""
    optimizer: int
    """Numbers that the optimizer remembers of what is held."""


class StateCounter:
    """Counts the state of units, each kind of them once for the axes that it depends on."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self._optimizer = optimizer
        self._of = cache(self._count)
        self.of_units = cache(self._of_units)

    def of_unit(self, unit: Unit, shards: Shards) -> tuple[Elements, Elements, int]:
        """(held, used, numbers that the optimizer remembers)."""
        tensor, fsdp, expert, expert_tensor, expert_fsdp = shards
        dense = self._of(unit, False, Shards(tensor=tensor, fsdp=fsdp))
        if unit.moe is None:
            return Elements(dense[0], 0), Elements(dense[1], 0), dense[2]
        of_experts = Shards(expert=expert, expert_tensor=expert_tensor, expert_fsdp=expert_fsdp)
        experts = self._of(unit, True, of_experts)
        return Elements(dense[0], experts[0]), Elements(dense[1], experts[1]), dense[2] + experts[2]

    def _of_units(self, counted: tuple[tuple[Unit, int], ...], shards: Shards) -> State:
        stored = stored_in_experts = used = used_in_experts = outside = optimizer = largest_layer = 0
        dense, experts = [0, 0], [0, 0]  # of two layers, at least
        for unit, count in counted:
            here, whole, remembered = self.of_unit(unit, shards)
            stored, stored_in_experts = (
                stored + here.dense * count,
                stored_in_experts + here.in_experts * count,
            )
            used, used_in_experts = used + whole.dense * count, used_in_experts + whole.in_experts * count
            optimizer += remembered * count
            if unit.is_layer:
                dense += [whole.dense] * min(2, count)
                experts += [whole.in_experts] * min(2, count)
                largest_layer = max(largest_layer, whole.both)
            else:
                outside += whole.dense * count
        dense.sort()
        experts.sort()
        return State(
            stored=Elements(stored, stored_in_experts), used=Elements(used, used_in_experts),
            gathered=Elements(outside + dense[-1] + dense[-2], experts[-1] + experts[-2]),
            in_layers=used + used_in_experts - outside, largest_layer=largest_layer,
            largest=Elements(dense[-1], experts[-1]), optimizer=optimizer,
        )  # fmt: skip

    def _count(self, unit: Unit, of_experts: bool, shards: Shards) -> tuple[int, int, int]:
        weights = [weight for weight in unit.weights if weight.of_experts == of_experts]
        stored = [weight.local_shape(shards) for weight in weights]
        used = sum(prod(weight.used(shards)) for weight in weights)
        remembered = sum(self._optimizer.state_elements(shape, of_experts) for shape in stored)
        return sum(map(prod, stored)), used, remembered


def state_of(model: ModelSpec, degrees: Degrees, optimizer: OptimizerSpec) -> State:
    """State of a whole model."""
    (whole,) = stages(units(model, profile_of()), 1, 1)
    return StateCounter(optimizer).of_units(whole.units, degrees.shards)
