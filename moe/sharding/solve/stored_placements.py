"""Placements in which a parameter or buffer may be stored. No torch."""

from collections.abc import Sequence

from moe.sharding.placement import WHOLE, Placements, split


def placements_of_stored(shape: Sequence[int], degrees: Sequence[int], is_loop: bool) -> list[Placements]:
    """All placements on a mesh of these degrees, the unsplit one first. If axis 0 is a loop, nothing is split along
    it."""
    choices: list[Placements] = [()]
    for axis, degree in enumerate(degrees):
        along = [WHOLE] if degree == 1 or (axis == 0 and is_loop) else [WHOLE, *map(split, range(len(shape)))]
        choices = [(*before, placement) for before in choices for placement in along]
    return choices


def has_no_empty_part(shape: Sequence[int], placements: Placements, degrees: Sequence[int]) -> bool:
    """Whether every rank has a part with elements: no dimension is split into more parts than it has rows."""
    parts = [1] * len(shape)
    for placement, degree in zip(placements, degrees, strict=True):
        if placement.dim is not None:
            parts[placement.dim] *= degree
    return all(count == 1 or size >= count for size, count in zip(shape, parts, strict=True))
