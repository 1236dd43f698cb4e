"""Elements of parameters, gradients and optimizer state on the fullest rank, counted weight by weight."""

from collections.abc import Iterable
from functools import cache
from itertools import chain
from math import prod
from typing import NamedTuple

from moe.plan.cost.stages import PipelineChoices, stages
from moe.plan.cost.units import Unit, units
from moe.plan.degrees import Degrees, ShardCounts
from moe.plan.profile import find_profile
from moe.spec import ModelSpec, OptimizerSpec


class Elements(NamedTuple):
    """Number of parameter elements, outside experts and in experts."""

    dense: int
    in_experts: int

    @property
    def total(self) -> int:
        return self.dense + self.in_experts


class UnitState(NamedTuple):
    """State of one unit on the fullest rank: elements of weights; bytes of quantized weights (`coded`), scales
    included."""

    stored: Elements
    """Sharded over data ranks."""
    used: Elements
    """Gathered over data ranks."""
    trained_stored: Elements
    trained_used: Elements
    optimizer: Elements
    """Moments, of `moment_bytes` each."""
    coded_stored: Elements
    """Sharded over data ranks."""
    coded_used: Elements
    """Gathered over data ranks."""
    matrices_stored: Elements
    """Part of `trained_stored` that are matrices of layers, without routers."""
    matrices_used: Elements
    """The same of `trained_used`."""


class PartState(NamedTuple):
    """State of a unit's experts, or of its other weights, on the fullest rank: the fields of `UnitState`."""

    stored: int
    used: int
    trained_stored: int
    trained_used: int
    optimizer: int
    coded_stored: int
    coded_used: int
    matrices_stored: int
    matrices_used: int


_NOTHING = Elements(0, 0)


class StateElements(NamedTuple):
    """`UnitState` summed over units, and parts of it."""

    stored: Elements
    used: Elements
    trained_stored: Elements
    trained_used: Elements
    coded_stored: Elements
    coded_used: Elements
    matrices_stored: Elements
    matrices_used: Elements
    coded_gathered: Elements
    """Part of `coded_used` that FSDP gathers at a time: two layers."""
    gathered: Elements
    """Part of `used` that FSDP gathers at a time: the current and the next layer, and all outside layers."""
    outside: int
    """Part of `used` outside layers."""
    two_layers: Elements
    in_layers: int
    largest_layer: int
    largest: Elements
    """Most of any layer outside experts, and in experts."""
    optimizer: int


class StateCounter:
    """Counts the state of units, cached by unit and the axes that matter."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self._optimizer = optimizer
        self.of_part = cache(self._count)
        self.of_unit = cache(self._of_unit)
        self.of_units = cache(self._of_units)

    def _of_unit(self, unit: Unit, shards: ShardCounts) -> UnitState:
        tensor, fsdp, expert, expert_tensor, expert_fsdp = shards
        dense = self.of_part(unit, False, ShardCounts(tensor=tensor, fsdp=fsdp))
        experts = PartState(*(0,) * len(dense))
        if unit.moe is not None:
            experts = self.of_part(
                unit, True, ShardCounts(expert=expert, expert_tensor=expert_tensor, expert_fsdp=expert_fsdp)
            )
        return UnitState(*map(Elements, dense, experts))

    def _of_units(self, unit_counts: tuple[tuple[Unit, int], ...], shards: ShardCounts) -> StateElements:
        sums = [0] * 2 * len(UnitState._fields)
        outside = largest_layer = 0
        dense, experts = [0, 0], [0, 0]  # two zeros, in case there are fewer than two layers
        codes = [_NOTHING, _NOTHING]
        for unit, count in unit_counts:
            unit_state = self.of_unit(unit, shards)
            sums = [total + count * number for total, number in zip(sums, chain.from_iterable(unit_state), strict=True)]
            if not unit.is_layer:
                outside += unit_state.used.dense * count
                continue
            num_copies = min(2, count)
            dense += [unit_state.used.dense] * num_copies
            experts += [unit_state.used.in_experts] * num_copies
            codes += [unit_state.coded_used] * num_copies
            largest_layer = max(largest_layer, unit_state.used.total)
        dense.sort()
        experts.sort()
        total = UnitState(*map(Elements, sums[::2], sums[1::2]))
        return StateElements(
            total.stored, total.used, total.trained_stored, total.trained_used, total.coded_stored, total.coded_used,
            total.matrices_stored, total.matrices_used,
            coded_gathered=Elements(
                _two_most(entry.dense for entry in codes), _two_most(entry.in_experts for entry in codes)
            ),
            gathered=Elements(outside + dense[-1] + dense[-2], experts[-1] + experts[-2]), outside=outside,
            two_layers=Elements(dense[-1] + dense[-2], experts[-1] + experts[-2]),
            in_layers=total.used.total - outside, largest_layer=largest_layer,
            largest=Elements(dense[-1], experts[-1]), optimizer=total.optimizer.total,
        )  # fmt: skip

    def _count(self, unit: Unit, of_experts: bool, shards: ShardCounts) -> PartState:
        part_weights = [weight for weight in unit.weights if weight.of_experts == of_experts]
        weights = [weight for weight in part_weights if weight.item_bytes is None]
        coded_weights = [(weight, weight.item_bytes) for weight in part_weights if weight.item_bytes is not None]
        trained_weights = [weight for weight in weights if weight.is_trained]
        local = [weight.local_shape(shards) for weight in trained_weights]
        matrices = [weight for weight in trained_weights if weight.is_hidden_matrix] if unit.is_layer else []
        optimizer = sum(
            self._optimizer.state_elements(
                shape, full_shape=weight.shape, of_experts=of_experts, is_hidden_matrix=weight.is_hidden_matrix
            )
            for weight, shape in zip(trained_weights, local, strict=True)
        )
        return PartState(
            stored=sum(prod(weight.local_shape(shards)) for weight in weights),
            used=sum(prod(weight.unsharded_shape(shards)) for weight in weights),
            trained_stored=sum(map(prod, local)),
            trained_used=sum(prod(weight.unsharded_shape(shards)) for weight in trained_weights),
            optimizer=optimizer,
            coded_stored=sum(width * prod(weight.local_shape(shards)) for weight, width in coded_weights),
            coded_used=sum(width * prod(weight.unsharded_shape(shards)) for weight, width in coded_weights),
            matrices_stored=sum(prod(weight.local_shape(shards)) for weight in matrices),
            matrices_used=sum(prod(weight.unsharded_shape(shards)) for weight in matrices),
        )


def _two_most(numbers: Iterable[int]) -> int:
    return sum(sorted(numbers)[-2:])


def state_of(
    model: ModelSpec, degrees: Degrees, optimizer: OptimizerSpec, freeze: tuple[str, ...] = ()
) -> StateElements:
    """State of a whole model; `freeze` patterns name untrained parameters."""
    (stage,) = stages(units(model, find_profile(), freeze), PipelineChoices())
    return StateCounter(optimizer).of_units(stage.units, degrees.shards)
