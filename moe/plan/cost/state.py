"""Numbers that the fullest rank has of parameters, gradients and the optimizer's state, counted weight by weight."""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

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


class UnitState(NamedTuple):
    """Elements of one unit's parameters on the fullest rank."""

    stored: Elements
    """Cut up over data ranks."""
    used: Elements
    """Gathered from them."""
    trained_stored: Elements
    """Of both, what has gradients."""
    trained_used: Elements
    optimizer: int
    """Numbers that the optimizer remembers."""


@dataclass(frozen=True)
class State:
    """Elements and bytes of some units' parameters on the fullest rank, exactly."""

    stored: Elements
    """Cut up over data ranks."""
    used: Elements
    """As they are used: what is sharded over data ranks counts as it is gathered."""
    trained_stored: Elements
    """Of what is stored, what has gradients, which frozen parameters have not."""
    trained_used: Elements
    gathered: Elements
    """Of those used, what FSDP has at a time: two layers, the one at work and the next, and what lies in none."""
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

    def of_unit(self, unit: Unit, shards: Shards) -> UnitState:
        """Of one of them."""
        tensor, fsdp, expert, expert_tensor, expert_fsdp = shards
        dense = self._of(unit, False, Shards(tensor=tensor, fsdp=fsdp))
        experts = (0, 0, 0, 0, 0)
        if unit.moe is not None:
            experts = self._of(
                unit, True, Shards(expert=expert, expert_tensor=expert_tensor, expert_fsdp=expert_fsdp)
            )
        stored, used, trained_stored, trained_used = map(Elements, dense[:4], experts[:4])
        return UnitState(stored, used, trained_stored, trained_used, dense[4] + experts[4])

    def _of_units(self, counted: tuple[tuple[Unit, int], ...], shards: Shards) -> State:
        totals = dict.fromkeys(("stored", "used", "trained_stored", "trained_used"), Elements(0, 0))
        outside = optimizer = largest_layer = 0
        dense, experts = [0, 0], [0, 0]  # of two layers, at least
        for unit, count in counted:
            here = self.of_unit(unit, shards)
            for name, total in totals.items():
                of: Elements = getattr(here, name)
                totals[name] = Elements(
                    total.dense + of.dense * count, total.in_experts + of.in_experts * count
                )
            optimizer += here.optimizer * count
            if unit.is_layer:
                dense += [here.used.dense] * min(2, count)
                experts += [here.used.in_experts] * min(2, count)
                largest_layer = max(largest_layer, here.used.both)
            else:
                outside += here.used.dense * count
        dense.sort()
        experts.sort()
        return State(
            **totals,
            gathered=Elements(outside + dense[-1] + dense[-2], experts[-1] + experts[-2]),
            in_layers=totals["used"].both - outside, largest_layer=largest_layer,
            largest=Elements(dense[-1], experts[-1]), optimizer=optimizer,
        )  # fmt: skip

    def _count(self, unit: Unit, of_experts: bool, shards: Shards) -> tuple[int, int, int, int, int]:
        weights = [weight for weight in unit.weights if weight.of_experts == of_experts]
        trained = [weight for weight in weights if weight.trained]
        local = [weight.local_shape(shards) for weight in trained]
        return (
            sum(prod(weight.local_shape(shards)) for weight in weights),
            sum(prod(weight.used(shards)) for weight in weights),
            sum(map(prod, local)),
            sum(prod(weight.used(shards)) for weight in trained),
            sum(self._optimizer.state_elements(shape, of_experts) for shape in local),
        )


def state_of(
    model: ModelSpec, degrees: Degrees, optimizer: OptimizerSpec, freeze: tuple[str, ...] = ()
) -> State:
    """State of a whole model, of which the parameters that match a pattern of `freeze` are not trained."""
    (whole,) = stages(units(model, profile_of(), freeze), 1, 1)
    return StateCounter(optimizer).of_units(whole.units, degrees.shards)
