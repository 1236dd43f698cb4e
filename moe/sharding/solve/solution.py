"""Limits given to an integer program, placements for storage, and its solution. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe.sharding.placement import WHOLE, Placements, split
from moe.sharding.propagation.assignment import Assignment


@dataclass(frozen=True)
class MemoryLimits:
    """Memory that a rank may use, and optimizer state per byte of a trained parameter."""

    memory_bytes: float
    optimizer_slots: float = 2.0
    """Bytes of optimizer state for each byte of a trained parameter. The gradient takes one more byte."""


@dataclass(frozen=True, eq=False)
class ShardingSolution:
    """The cheapest assignment, with the costs of a step on one rank."""

    assignment: Assignment
    seconds: float
    memory_bytes: float
    relaxed_s: float
    """Lower bound: the cost of the program's linear relaxation."""
    was_integral: bool
    """Whether the solution of the relaxation was integral."""
    num_variables: int
    largest_bytes: float
    """Peak bytes: operands and results of the largest operator, plus recomputed tensors of the largest block."""


def placements_of_stored(shape: Sequence[int], degrees: Sequence[int], is_loop: bool) -> list[Placements]:
    """All placements on a mesh of these degrees, the unsplit one first. If axis 0 is a loop, nothing is split along
    it."""
    choices: list[Placements] = [()]
    for axis, degree in enumerate(degrees):
        axis_choices = [WHOLE] if degree == 1 or (axis == 0 and is_loop) else [WHOLE, *map(split, range(len(shape)))]
        choices = [(*prefix, placement) for prefix in choices for placement in axis_choices]
    return choices


def has_no_empty_part(shape: Sequence[int], placements: Placements, degrees: Sequence[int]) -> bool:
    """Whether every rank has a part with elements: no dimension is split into more parts than it has rows."""
    parts = [1] * len(shape)
    for placement, degree in zip(placements, degrees, strict=True):
        if placement.dim is not None:
            parts[placement.dim] *= degree
    return all(count == 1 or size >= count for size, count in zip(shape, parts, strict=True))
