"""Placements of a tensor on a mesh: along each axis whole, split, or in partial results. No torch.

A dimension of `n` split over `w` ranks is cut into parts of `ceil(n / w)`, as `torch.chunk` and DTensor cut it: the
last ones may be smaller or empty. Here all parts are padded to that size, so that every rank runs the same program
(GShard, arXiv 2006.16668, section 3.3). What the padding holds may be anything. Where several axes split one dimension,
each cuts the padded parts of those before it at the same places on all ranks; DTensor cuts an uneven last part by its
own size there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Combine = Literal["sum", "max", "min"]
COMBINES: frozenset[Combine] = frozenset(get_args(Combine))
MAX_AXES = 3
"""Most axes of a mesh: each multiplies the ways to split an operator."""


@dataclass(frozen=True)
class AxisPlacement:
    """Placement along one mesh axis: split if `dim` is set, partial results if `combine` is set, else whole."""

    dim: int | None = None
    """The tensor dimension that the axis splits, counted from 0."""
    combine: Combine | None = None
    """Operation that combines the ranks' partial results."""

    def __str__(self) -> str:
        if self.dim is not None:
            return f"S({self.dim})"
        return "R" if self.combine is None else f"P({self.combine})"


WHOLE = AxisPlacement()

Placements = tuple[AxisPlacement, ...]
"""One for each mesh axis, outermost first."""


def split(dim: int) -> AxisPlacement:
    return AxisPlacement(dim=dim)


def partial(combine: Combine = "sum") -> AxisPlacement:
    return AxisPlacement(combine=combine)


def axes_of(placements: Placements, dim: int) -> list[int]:
    """Mesh axes that split a dimension, outermost first."""
    return [axis for axis, placement in enumerate(placements) if placement.dim == dim]


def part_shape(shape: Sequence[int], placements: Placements, degrees: Sequence[int]) -> tuple[int, ...]:
    """Shape of each rank's part, padded; `degrees` are the ranks along each axis."""
    sizes = list(shape)
    for placement, degree in zip(placements, degrees, strict=True):
        if placement.dim is not None:
            sizes[placement.dim] = -(-sizes[placement.dim] // degree)
    return tuple(sizes)


def part_bytes(shape: Sequence[int], itemsize: int, placements: Placements, degrees: Sequence[int]) -> int:
    """Bytes of each rank's part, padded."""
    return itemsize * math.prod(part_shape(shape, placements, degrees))


def unpadded_shape(
    shape: Sequence[int], placements: Placements, degrees: Sequence[int], indices: Sequence[int]
) -> tuple[int, ...]:
    """Shape of a rank's part without padding; `indices` are the rank's along each axis."""
    sizes, padded_sizes = list(shape), list(shape)
    for placement, degree, index in zip(placements, degrees, indices, strict=True):
        if (dim := placement.dim) is not None:
            padded_sizes[dim] = -(-padded_sizes[dim] // degree)
            sizes[dim] = min(max(sizes[dim] - index * padded_sizes[dim], 0), padded_sizes[dim])
    return tuple(sizes)


def stored_extent(
    shape: Sequence[int], placements: Placements, degrees: Sequence[int], indices: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of a rank's shard in the whole tensor, as DTensor cuts it: where several axes split a dimension,
    each splits the shard of the axes before it evenly."""
    offsets, sizes = [0] * len(shape), list(shape)
    for placement, degree, index in zip(placements, degrees, indices, strict=True):
        if (dim := placement.dim) is not None:
            chunk = -(-sizes[dim] // degree)
            first = min(index * chunk, sizes[dim])
            offsets[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    return tuple(offsets), tuple(sizes)
