"""Shards of parameters and buffers as DTensors, and their conversion to and from the parts that programs use.

A DTensor's shards and a program's parts are the same unless several axes split one dimension unevenly (see
`moe.sharding.placement`); then rows are exchanged within each slice of the outermost of these axes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe.sharding.exchange.exchange import gather, pad_end, strip_padding, take_part
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.placement import Placements, axes_of, stored_extent


def as_dtensor(shard: Tensor, shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    """The DTensor of this shape with this rank's shard, in the same memory; on one device, the shard itself."""
    if mesh.device_mesh is None:
        return shard
    axes = [Replicate() if placement.dim is None else Shard(placement.dim) for placement in placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(shard, mesh.device_mesh, axes, run_check=False, shape=torch.Size(shape), stride=stride)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, differentiable and in the same memory; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut(full_tensor: Tensor, placements: Placements, mesh: Mesh) -> Tensor:
    """View of this rank's shard of a full tensor."""
    offsets, sizes = stored_extent(full_tensor.shape, placements, mesh.degrees, mesh.indices)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        full_tensor = full_tensor.narrow(dim, offset, size)
    return full_tensor


def to_program(shard: Tensor, shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    """This rank's part, unpadded, as a program takes it; differentiable. Collective where shards and parts differ."""
    if not any(_uneven(shape, placements, mesh)):
        return shard
    return _ToProgram.apply(shard, shape, placements, mesh)


def from_program(part: Tensor, shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    """This rank's shard, contiguous, from the part that a program returns, padded or not. Collective where shards and
    parts differ."""
    part = strip_padding(part, shape, placements, mesh)
    for dim, size, _ in _uneven(shape, placements, mesh):
        outer, *inner = axes_of(placements, dim)
        chunk = -(-shape[dim] // mesh.degrees[outer])
        sizes = [chunk]
        for axis in inner:
            sizes.append(-(-sizes[-1] // mesh.degrees[axis]))
        part = pad_end(part, dim, sizes[-1])
        for axis, outer_size in zip(reversed(inner), reversed(sizes[:-1]), strict=True):
            part = gather(mesh, part, axis, dim, outer_size)
        part = part.narrow(dim, 0, size)
        for axis in inner:
            rows = part.shape[dim]
            piece = -(-rows // mesh.degrees[axis])
            begin = min(mesh.indices[axis] * piece, rows)
            part = part.narrow(dim, begin, min(piece, rows - begin))
    return part.contiguous()


def _recut(shard: Tensor, shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    for dim, size, chunk in _uneven(shape, placements, mesh):
        _, *inner = axes_of(placements, dim)
        outer_sizes = [size]  # rows of the shard along each axis, before the next axis splits it
        for axis in inner[:-1]:
            pieces = -(-outer_sizes[-1] // mesh.degrees[axis])
            outer_sizes.append(min(max(outer_sizes[-1] - mesh.indices[axis] * pieces, 0), pieces))
        for axis, rows in zip(reversed(inner), reversed(outer_sizes), strict=True):
            shard = pad_end(shard, dim, -(-rows // mesh.degrees[axis]))
            shard = gather(mesh, shard, axis, dim, rows)
        part = pad_end(shard, dim, chunk)
        for axis in inner:
            chunk = -(-chunk // mesh.degrees[axis])
            part = take_part(mesh, part, axis, dim, chunk)
        shard = part
    return strip_padding(shard, shape, placements, mesh)


def _uneven(shape: Sequence[int], placements: Placements, mesh: Mesh) -> Iterator[tuple[int, int, int]]:
    """(dimension, rows of this rank's slice along the outermost axis that splits it, rows of a full slice) for the
    dimensions whose shards and parts may differ here. Ranks that differ only in inner axes get the same."""
    for dim, size in enumerate(shape):
        axes = axes_of(placements, dim)
        if len(axes) < 2:
            continue
        chunk = -(-size // mesh.degrees[axes[0]])
        local_rows = min(max(size - mesh.indices[axes[0]] * chunk, 0), chunk)
        is_deeper = chunk % math.prod(mesh.degrees[axis] for axis in axes[1:-1]) != 0
        if local_rows and (local_rows < chunk or is_deeper):
            yield dim, local_rows, chunk


class _ToProgram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, *layout: Any) -> Tensor:
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return _recut(shard, *layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return None if gradient is None else from_program(gradient, *ctx.layout), None, None, None
