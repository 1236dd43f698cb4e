"""Functions that programs call besides torch's operators and exchanges: positions and masks that depend on the rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.sharding.exchange.mesh import Mesh


def first(mesh: Mesh, size: int, axes: Sequence[int]) -> int:
    """First position of the rank's part of a dimension of this size that these axes split."""
    return mesh.first(size, axes)


def valid(mesh: Mesh, size: int, axes: Sequence[int]) -> int:
    """Length of the rank's part without padding."""
    return mesh.valid(size, axes)


def mask(part: Tensor, dim: int, count: int, value: float) -> Tensor:
    """The part with `value` after the first `count` positions of a dimension."""
    if count == part.shape[dim]:
        return part
    shape = [1] * part.dim()
    shape[dim] = part.shape[dim]
    positions = torch.arange(part.shape[dim], device=part.device).view(shape)
    return torch.where(positions < count, part, torch.full((), value, dtype=part.dtype, device=part.device))


def zero_other_ranks(mesh: Mesh, part: Tensor, axes: Sequence[int]) -> Tensor:
    """The part on the first rank along some axes, zeros on the others, so that partial sums contain it once."""
    return part if mesh.is_first(axes) else torch.zeros_like(part)
