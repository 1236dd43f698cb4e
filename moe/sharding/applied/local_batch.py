"""Local batches: each rank is called with rows of its own, as a DistributedSampler gives them, and the global batch is
gathered of them, in the order of ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe.sharding.applied.checksum import every_rank
from moe.sharding.exchange.exchange import as_bytes
from moe.sharding.exchange.mesh import Mesh


def global_batch(
    mesh: Mesh, batch: Sequence[Any], expected: Sequence[Any], device: torch.device
) -> tuple[Any, ...]:
    """The global batch of all ranks' local ones. The tensors that the plan has with as many rows as the first (of
    `expected`, a shape and a dtype each) are cut by rows; others, as a mask or a temperature, are the same everywhere.
    All ranks call it. Raises ValueError, on every rank, where ranks have other numbers of rows."""
    leaves, tree = pytree.tree_flatten(list(batch))
    if mesh.num_ranks == 1:
        return tuple(batch)
    planned = [each[0] if isinstance(each, tuple) else () for each in expected]
    num_rows = next((shape[0] for shape in planned if shape), None)
    own = [
        number
        for number, (leaf, shape) in enumerate(zip(leaves, planned, strict=False))
        if isinstance(leaf, Tensor) and leaf.dim() and shape and shape[0] == num_rows
    ]
    # a collective that each rank enters in whatever it was called with, and in which all see who differs
    shapes = torch.zeros(1 + len(expected), dtype=torch.int64)
    shapes[0] = len(leaves)
    for number in own:
        shapes[1 + number] = leaves[number].shape[0]
    every = every_rank(mesh, shapes.to(device)).tolist()
    if any(rows != every[0] for rows in every):
        rows = {rank: [count for count in of_rank[1:] if count] for rank, of_rank in enumerate(every)}
        raise ValueError(
            f"local batches have other numbers of rows by rank ({rows}); give all ranks the same number, as "
            "DistributedSampler(..., drop_last=True) and DataLoader(..., drop_last=True) do"
        )
    for number in own:
        leaves[number] = _gathered(mesh, leaves[number])
    return tuple(pytree.tree_unflatten(leaves, tree))


def _gathered(mesh: Mesh, rows: Tensor) -> Tensor:
    rows = rows.resolve_conj().resolve_neg().contiguous()
    if rows.is_complex():
        return torch.view_as_complex(_gathered(mesh, torch.view_as_real(rows)))
    every = every_rank(mesh, as_bytes(rows)).flatten(0, 1)
    return every.view(torch.bool) if rows.dtype == torch.bool else every
