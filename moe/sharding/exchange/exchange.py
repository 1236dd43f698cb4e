"""Changes of a tensor's placement, on padded parts: what a program calls where placements change."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.sharding.exchange.mesh import Mesh
from moe.sharding.exchange.moves import PlacementMove
from moe.sharding.placement import Combine, Placements, part_shape, unpadded_shape

Pending = Callable[[], Tensor]
"""A collective that was begun: called once, it waits for what comes of it."""


def gather(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Tensor:
    """The whole along an axis, `size` long in `dim`, of parts that split it."""
    return begin_gather(mesh, part, axis, dim, size)()


def begin_gather(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Pending:
    wait = mesh.begin_all_gather(as_bytes(part.movedim(dim, 0).contiguous()), axis)
    return lambda: wait().view(part.dtype)[:size].movedim(0, dim)


def take_part(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Tensor:
    """This rank's part, `size` long in `dim`, of what all ranks along an axis have."""
    return pad_end(part, dim, mesh.degrees[axis] * size).narrow(dim, mesh.indices[axis] * size, size)


def all_to_all(
    mesh: Mesh, part: Tensor, axis: int, before: int, after: int, size_before: int, size_after: int
) -> Tensor:
    """The part split in dimension `after`, `size_after` long, of parts split in `before`, which together are
    `size_before` long."""
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
    """The whole of partial results."""
    return begin_all_reduce(mesh, part, axis, combine)()


def begin_all_reduce(mesh: Mesh, part: Tensor, axis: int, combine: Combine) -> Pending:
    wait = mesh.begin_all_reduce(as_bytes(part.contiguous()), axis, combine)
    return lambda: wait().view(part.dtype)


def reduce_scatter(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Tensor:
    """This rank's part, `size` long in `dim`, of the sum of partial results."""
    return begin_reduce_scatter(mesh, part, axis, dim, size)()


def begin_reduce_scatter(mesh: Mesh, part: Tensor, axis: int, dim: int, size: int) -> Pending:
    rows = pad_end(part, dim, mesh.degrees[axis] * size).movedim(dim, 0).contiguous()
    wait = mesh.begin_reduce_scatter(rows, axis)
    return lambda: wait().movedim(0, dim)


def finish(pending: Pending) -> Tensor:
    """What comes of a collective that was begun."""
    return pending()


BEGUN: dict[Any, Any] = {
    gather: begin_gather,
    all_reduce: begin_all_reduce,
    reduce_scatter: begin_reduce_scatter,
}
"""Of exchanges that arithmetic may go on beside, the ones that only begin them."""


def keep_first(mesh: Mesh, part: Tensor, axis: int, combine: Combine) -> Tensor:
    """Partial results of what all ranks along an axis have: the largest or smallest of equal values is that value, a
    sum is left to the first rank."""
    return torch.zeros_like(part) if combine == "sum" and mesh.indices[axis] > 0 else part


def part_of(whole: Tensor, placements: Placements, mesh: Mesh) -> Tensor:
    """This rank's padded part of a tensor that every rank has whole. Raises ValueError for partial results."""
    part, sizes = whole, list(whole.shape)
    for axis, (placement, degree) in enumerate(zip(placements, mesh.degrees, strict=True)):
        if placement.combine is not None:
            raise ValueError(f"a tensor that every rank has whole is no {placement} of itself")
        if placement.dim is not None:
            sizes[placement.dim] = -(-sizes[placement.dim] // degree)
            part = take_part(mesh, part, axis, placement.dim, sizes[placement.dim])
    return part


def strip_padding(part: Tensor, shape: Sequence[int], placements: Placements, mesh: Mesh) -> Tensor:
    """This rank's part without padding: a view. `shape` is the whole's."""
    for dim, size in enumerate(unpadded_shape(shape, placements, mesh.degrees, mesh.indices)):
        if part.shape[dim] != size:
            part = part.narrow(dim, 0, size)
    return part


def padded_to(part: Tensor, shape: Sequence[int]) -> Tensor:
    """The part with zeros at the ends of its dimensions, up to a shape."""
    for dim, size in enumerate(shape):
        part = pad_end(part, dim, size)
    return part


def apply_moves(
    part: Tensor, shape: Sequence[int], placements: Placements, moves: Iterable[PlacementMove], mesh: Mesh
) -> Tensor:
    """This rank's padded part of a tensor of this shape after moves, which all ranks make. Never `part` changed in
    place; it may share its memory.

    Raises CollectiveError where another rank does not come.
    """
    for move in moves:
        assert placements[move.axis] == move.before
        placements = (*placements[: move.axis], move.after, *placements[move.axis + 1 :])
        function, *arguments = call_of(move, part_shape(shape, placements, mesh.degrees))
        part = function(mesh, part, *arguments)
    return part


def call_of(move: PlacementMove, sizes: Sequence[int]) -> tuple[Any, ...]:
    """The function above that makes a move, and its arguments after the mesh and the part; `sizes` are those of a part
    afterwards."""
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
    """With zeros at the end of a dimension."""
    if part.shape[dim] == size:
        return part
    behind = [0, 0] * (part.dim() - 1 - dim) + [0, size - part.shape[dim]]
    return pad(part, behind)


def as_bytes(tensor: Tensor) -> Tensor:
    """Truth values as bytes, in the same memory: gloo and NCCL do not know them."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
