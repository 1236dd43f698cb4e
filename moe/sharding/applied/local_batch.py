"""Local batches: each rank is called with rows of its own, as a DistributedSampler gives them, and the global batch is
gathered from them in rank order."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe.sharding.applied.batch import leaves_in_order
from moe.sharding.applied.checksum import every_rank
from moe.sharding.exchange.exchange import as_bytes
from moe.sharding.exchange.mesh import Mesh


def global_batch(
    mesh: Mesh, batch: Sequence[Any], plan_leaves: Sequence[Any], tree: pytree.TreeSpec, device: torch.device
) -> tuple[Any, ...]:
    """The global batch, gathered from all ranks' local batches. Tensors that have as many rows in the plan
    (`plan_leaves`) as its first tensor are split by rows; others, such as a mask or a temperature, are the same on all
    ranks. All ranks call it. Raises ValueError, on every rank, if local batches differ in more than values."""
    if mesh.num_ranks == 1:
        return tuple(batch)
    refusal, leaves = None, list[Any]()
    try:
        leaves = leaves_in_order(batch, tree)
    except ValueError as error:  # raised once all ranks know of it
        refusal = error
    plan_shapes = [entry[0] if isinstance(entry, tuple) else () for entry in plan_leaves]
    num_rows = next((shape[0] for shape in plan_shapes if shape), None)
    split_numbers = [
        number
        for number, (leaf, shape) in enumerate(zip(leaves, plan_shapes, strict=False))
        if isinstance(leaf, Tensor) and leaf.dim() and shape and shape[0] == num_rows
    ]
    # its size is the same on every rank, so that the exchange succeeds and all ranks see which batches differ
    signature = torch.zeros(1 + len(plan_leaves), 2, dtype=torch.int64)
    signature[0, 0] = len(leaves)
    for number in split_numbers:
        rows = leaves[number]
        signature[1 + number, 0] = rows.shape[0]
        signature[1 + number, 1] = zlib.crc32(repr((tuple(rows.shape[1:]), rows.dtype)).encode())
    signatures = every_rank(mesh, signature.to(device)).tolist()
    if refusal is not None:
        raise refusal
    _check_alike(signatures)
    for number in split_numbers:
        leaves[number] = _all_gather_rows(mesh, leaves[number])
    return tuple(pytree.tree_unflatten(leaves, tree))


def _check_alike(signatures: list[list[list[int]]]) -> None:
    """Raise ValueError if ranks' local batches have different signatures."""
    if refusing := [str(rank) for rank, ((num_leaves, _), *_) in enumerate(signatures) if not num_leaves]:
        raise ValueError(f"the batch was refused on rank {', '.join(refusing)}; see the error there")
    rows = {rank: [count for count, _ in rank_signature[1:] if count] for rank, rank_signature in enumerate(signatures)}
    if any(counts != rows[0] for counts in rows.values()):
        raise ValueError(
            f"local batches must have the same number of rows on all ranks ({rows}); use drop_last=True in "
            "DistributedSampler and DataLoader"
        )
    if different := {
        number
        for rank_signature in signatures
        for number, (entry, first) in enumerate(zip(rank_signature[1:], signatures[0][1:], strict=True))
        if entry != first
    }:
        names = ", ".join(f"inputs.{number}" for number in sorted(different))
        raise ValueError(
            f"rows of {names} have different shapes or dtypes on different ranks; pad all local batches to one length"
        )


def _all_gather_rows(mesh: Mesh, rows: Tensor) -> Tensor:
    rows = rows.resolve_conj().resolve_neg().contiguous()
    if rows.is_complex():
        return torch.view_as_complex(_all_gather_rows(mesh, torch.view_as_real(rows)))
    all_rows = every_rank(mesh, as_bytes(rows)).flatten(0, 1)
    return all_rows.view(torch.bool) if rows.dtype == torch.bool else all_rows
