"""Changes of a tensor's placement: functions on padded parts that programs call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.sharding.exchange.mesh import Mesh
from moe.sharding.exchange.moves import PlacementMove
from moe.sharding.placement import Combine, Placements, unpadded_shape

Pending = Callable[[], Tensor]
"""A collective that has started. It is called once, waits, and returns the result."""


def gather(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Tensor:
    """The whole tensor along an axis, with size `size` in `dim`, from parts that are split in `dim`."""
    return begin_gather(mesh, part, axis, dim, size)()


def begin_gather(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Pending:
    wait = mesh.begin_all_gather(as_bytes(part.movedim(dim, 0).contiguous()), axis)
    return lambda: wait().view(part.dtype)[:size].movedim(0, dim)


def take_part(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Tensor:
    """This rank's part, with size `size` in `dim`, of a tensor that all ranks along an axis have whole."""
    return pad_end(part, dim, mesh.degrees[axis] * size).narrow(dim, mesh.indices[axis] * size, size)


def all_to_all(
    mesh: Mesh, part: Tensor, axis: int, before: int, after: int, size_before: int, size_after: int
) -> Tensor:
    """This rank's part, split in dimension `after` with size `size_after`, from parts that are split in dimension
    `before`, whose whole size is `size_before`."""
    return begin_all_to_all(mesh, part, axis, before, after, size_before, size_after)()


def begin_all_to_all(
    mesh: Mesh, part: Tensor, axis: int, before: int, after: int, size_before: int, size_after: int
) -> Pending:
    degree = mesh.degrees[axis]
    rows = pad_end(part, after, degree * size_after)
    send_rows = as_bytes(rows.unflatten(after, (degree, size_after)).movedim(after, 0).contiguous())
    wait = mesh.begin_all_to_all(send_rows, axis, [1] * degree, [1] * degree)
    dtype = part.dtype
    return lambda: torch.cat(wait().view(dtype).unbind(0), before).narrow(before, 0, size_before)


def all_reduce(mesh: Mesh, part: Tensor, axis: int, combine: Combine) -> Tensor:
    """The whole tensor from partial results."""
    return begin_all_reduce(mesh, part, axis, combine)()


def begin_all_reduce(mesh: Mesh, part: Tensor, axis: int, combine: Combine) -> Pending:
    wait = mesh.begin_all_reduce(as_bytes(part.contiguous()), axis, combine)
    return lambda: wait().view(part.dtype)


def reduce_scatter(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Tensor:
    """This rank's part, with size `size` in `dim`, of the sum of partial results."""
    return begin_reduce_scatter(mesh, part, axis, dim, size)()


def begin_reduce_scatter(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Pending:
    rows = pad_end(part, dim, mesh.degrees[axis] * size).movedim(dim, 0).contiguous()
    wait = mesh.begin_reduce_scatter(rows, axis)
    return lambda: wait().movedim(0, dim)


def finish(pending: Pending) -> Tensor:
    """Wait for a collective that has started, and return its result."""
    return pending()


BEGIN_FUNCTIONS: dict[Any, Any] = {
    gather: begin_gather,
    all_reduce: begin_all_reduce,
    reduce_scatter: begin_reduce_scatter,
}
"""Functions that only start an exchange, by the exchange: those that can overlap with arithmetic."""


def keep_first(mesh: Mesh, part: Tensor, axis: int, combine: Combine) -> Tensor:
    """Partial results of a tensor that all ranks along an axis have. For a sum, only the first rank keeps the values;
    for the maximum or minimum, all ranks do."""
    return torch.zeros_like(part) if combine == "sum" and mesh.indices[axis] > 0 else part


def part_of(full_tensor: Tensor, placements: Placements, mesh: Mesh) -> Tensor:
    """This rank's padded part of a full tensor. Raises ValueError for placements with partial
    results."""
    part, sizes = full_tensor, list(full_tensor.shape)
    for axis, (placement, degree) in enumerate(zip(placements, mesh.degrees, strict=True)):
        if placement.combine is not None:
            raise ValueError(f"a whole tensor cannot be converted to {placement}")
        if placement.dim is not None:
            sizes[placement.dim] = -(-sizes[placement.dim] // degree)
            part = take_part(mesh, part, axis, placement.dim, sizes[placement.dim])
    return part


def strip_padding(part: Tensor, shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    """This rank's part without padding, as a view. `shape` is the shape of the whole tensor."""
    for dim, size in enumerate(unpadded_shape(shape, placements, mesh.degrees, mesh.indices)):
        if part.shape[dim] != size:
            part = part.narrow(dim, 0, size)
    return part


def padded_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """The part, padded to a shape with zeros at the ends of its dimensions."""
    for dim, size in enumerate(shape):
        part = pad_end(part, dim, size)
    return part


def call_of(move: PlacementMove, sizes: Sequence[int]) -> tuple[Any, ...]:
    """(function of this module that makes a move, its arguments after the mesh and the part). `sizes` is the shape of a
    part after the move."""
    before, after = move.before.dim, move.after.dim
    match move.kind:
        case "gather":
            assert before is not None
            return gather, move.axis, before, sizes[before]
        case "slice":
            assert after is not None
            return take_part, move.axis, after, sizes[after]
        case "all_to_all":
            assert before is not None
            assert after is not None
            return all_to_all, move.axis, before, after, sizes[before], sizes[after]
        case "all_reduce":
            return all_reduce, move.axis, move.before.combine
        case "reduce_scatter":
            assert after is not None
            return reduce_scatter, move.axis, after, sizes[after]
        case "keep_first":
            return keep_first, move.axis, move.after.combine


def pad_end(part: Tensor, dim: int, size: int) -> Tensor:
    """The part, padded with zeros at the end of a dimension to a size."""
    if part.shape[dim] == size:
        return part
    end_pads = [0, 0] * (part.dim() - 1 - dim) + [0, size - part.shape[dim]]
    return pad(part, end_pads)


def as_bytes(tensor: Tensor) -> Tensor:
    """Booleans as bytes, in the same memory, since gloo and NCCL do not support booleans."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
