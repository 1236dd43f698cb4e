"""Checks that all ranks are called with the same batch."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe.sharding.exchange.mesh import Mesh

EVERY_CALLS = 50
"""Number of calls from one check to the next. The first call is checked."""
_BLOCK = 1 << 20
"""Number of elements summed at a time."""


def check_same(mesh: Mesh, leaves: Sequence[Any] | None, plan_leaves: Sequence[Any], device: torch.device) -> None:
    """Raise ValueError, on every rank, if ranks were called with different tensors or a rank has refused its batch
    (`leaves` is None there). `plan_leaves` has a tuple in place of each tensor. All ranks call it."""
    numbers = [number for number, leaf in enumerate(plan_leaves) if isinstance(leaf, tuple)]
    if mesh.num_ranks == 1:
        return
    sums = [torch.zeros((), dtype=torch.int64)] * len(numbers)
    if leaves is not None:
        sums = [checksum(leaves[number]) for number in numbers]
    refuses = torch.tensor(int(leaves is None))
    rows = every_rank(mesh, torch.stack([tensor.to(device) for tensor in (refuses, *sums)])).tolist()
    if leaves is None:
        return
    ranks = range(mesh.num_ranks) if mesh.device_mesh is None else sorted(mesh.device_mesh.mesh.flatten().tolist())
    if refusing := [str(rank) for rank, (refuses_batch, *_) in zip(ranks, rows, strict=False) if refuses_batch]:
        raise ValueError(f"the batch was refused on rank {', '.join(refusing)}; see the error there")
    different = {
        rank: [number for number, *sums in zip(numbers, rank_row[1:], rows[0][1:], strict=True) if len({*sums}) > 1]
        for rank, rank_row in zip(ranks, rows, strict=False)
        if rank_row != rows[0]
    }  # fmt: skip
    if different:
        words = "; ".join(
            f"rank {rank}: {', '.join(f'inputs.{number}' for number in unlike)}" for rank, unlike in different.items()
        )
        raise ValueError(
            f"the batch differs between ranks (values unlike rank 0's at {words}); pass the global batch on every "
            'rank, or use apply(..., batch="local") if each rank has its own rows'
        )


def every_rank(mesh: Mesh, rows: Tensor) -> Tensor:
    """All ranks' `rows` `[...]` as `[ranks, ...]`, in the order of ranks. All ranks call it."""
    result = rows.unsqueeze(0).contiguous()
    for axis in reversed(range(len(mesh.degrees))):
        result = mesh.all_gather(result, axis)
    if mesh.device_mesh is None:
        return result
    places = mesh.device_mesh.mesh.flatten().argsort()
    if torch.equal(places, torch.arange(mesh.num_ranks)):
        return result
    return result[places.to(result.device)]


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a tensor's shape and bits, an int64 scalar: independent of device, strides and order of summation."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    shape_checksum = zlib.crc32(repr(tuple(tensor.shape)).encode())
    total = torch.tensor(shape_checksum, dtype=torch.int64, device=flat.device)
    for first in range(0, flat.numel(), _BLOCK):
        block = flat[first : first + _BLOCK].contiguous().view(bits).to(torch.int64)
        place = torch.arange(first, first + block.numel(), dtype=torch.int64, device=flat.device)
        # int64 sums wrap around, so their order does not matter; odd factors lose no bits
        product = (block + place * 0x2545F4914F6CDD1D) * 0x27D4EB2F165667C5
        total += ((product ^ (product >> 29)) * 0x1B873593CC9E2D51).sum()
    return total
