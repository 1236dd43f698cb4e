"""Moves of a tensor's parts between ranks, on padded parts, over NCCL or gloo."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single
from moe.sharding.moves import Move
from moe.sharding.placement import Placements, part_shape, unpadded_shape

_COMBINE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class ShardingMesh:
    """This rank's place on a mesh of one or two axes."""

    degrees: tuple[int, ...]
    """Ranks along each axis, outermost first."""
    indices: tuple[int, ...]
    """This rank's index along each."""
    groups: tuple[dist.ProcessGroup | None, ...]
    """The ranks that differ from this one along each axis alone; None where there are no others."""

    @classmethod
    def over(cls, degrees: Sequence[int]) -> "ShardingMesh":
        """All ranks call it, with a default process group over as many as the degrees multiply to; the last axis joins
        consecutive ranks. Raises ValueError where they multiply to another number."""
        ranks = torch.arange(dist.get_world_size() if dist.is_initialized() else 1)
        if ranks.numel() != torch.Size(degrees).numel():
            raise ValueError(
                f"degrees {tuple(degrees)} must multiply to the number of ranks (={ranks.numel()})"
            )
        mesh, rank = ranks.view(*degrees), dist.get_rank() if dist.is_initialized() else 0
        groups: list[dist.ProcessGroup | None] = []
        for axis, degree in enumerate(degrees):
            mine = None
            for members in mesh.movedim(axis, -1).reshape(-1, degree).tolist() if degree > 1 else ():
                group = dist.new_group(members)
                mine = group if rank in members else mine
            groups.append(mine)
        return cls(tuple(degrees), tuple((mesh == rank).nonzero()[0].tolist()), tuple(groups))

    def close(self) -> None:
        """Let go of its process groups. All ranks call it."""
        for group in self.groups:
            if group is not None:
                dist.destroy_process_group(group)


def part_of(whole: Tensor, placements: Placements, mesh: ShardingMesh) -> Tensor:
    """This rank's padded part of a tensor that every rank has whole. Raises ValueError for partial results."""
    part, sizes = whole, list(whole.shape)
    for each, degree, index in zip(placements, mesh.degrees, mesh.indices, strict=True):
        if each.combine is not None:
            raise ValueError(f"a tensor that every rank has whole is no {each} of itself")
        if each.dim is not None:
            sizes[each.dim] = -(-sizes[each.dim] // degree)
            part = _slice(part, each.dim, sizes[each.dim], degree, index)
    return part


def unpadded(part: Tensor, shape: Sequence[int], placements: Placements, mesh: ShardingMesh) -> Tensor:
    """This rank's part without padding: a view. `shape` is the whole's."""
    for dim, size in enumerate(unpadded_shape(shape, placements, mesh.degrees, mesh.indices)):
        part = part.narrow(dim, 0, size)
    return part


def moved(
    part: Tensor, shape: Sequence[int], placements: Placements, moves: Iterable[Move], mesh: ShardingMesh
) -> Tensor:
    """This rank's padded part of a tensor of this shape after moves, which all ranks make. Never `part` changed in
    place; it may share its memory.

    Raises CollectiveError where another rank does not come.
    """
    for move in moves:
        assert placements[move.axis] == move.before
        placements = (*placements[: move.axis], move.after, *placements[move.axis + 1 :])
        sizes = part_shape(shape, placements, mesh.degrees)
        if mesh.groups[move.axis] is not None:
            with collective(f"{move.kind} of a tensor of {list(shape)} from {move.before} to {move.after}"):
                part = _move(part, sizes, move, mesh)
    return part


def _move(part: Tensor, sizes: Sequence[int], move: Move, mesh: ShardingMesh) -> Tensor:
    """`sizes` are those of a part afterwards."""
    group, degree, index = mesh.groups[move.axis], mesh.degrees[move.axis], mesh.indices[move.axis]
    before, after = move.before.dim, move.after.dim
    match move.kind:
        case "gather":
            assert before is not None
            rows = _as_bytes(part.movedim(before, 0).contiguous())
            every = rows.new_empty(degree * rows.shape[0], *rows.shape[1:])
            all_gather_single(every, rows, group=group)
            return every.view(part.dtype)[: sizes[before]].movedim(0, before)
        case "slice":
            assert after is not None
            return _slice(part, after, sizes[after], degree, index)
        case "all_to_all":
            assert before is not None
            assert after is not None
            rows = _padded(part, after, degree * sizes[after])
            sent = _as_bytes(torch.stack(rows.split(sizes[after], after)))
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=group)
            every = torch.cat(received.view(part.dtype).unbind(0), before)
            return every.narrow(before, 0, sizes[before])
        case "all_reduce":
            assert move.before.combine is not None
            total = part.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(_as_bytes(total), _COMBINE[move.before.combine], group=group)
            return total
        case "reduce_scatter":
            assert after is not None
            rows = _padded(part, after, degree * sizes[after]).movedim(after, 0).contiguous()
            mine = rows.new_empty(sizes[after], *rows.shape[1:])
            reduce_scatter_single(mine, rows, group=group)
            return mine.movedim(0, after)
        case "keep_first":  # the largest or smallest of equal values is that value
            return torch.zeros_like(part) if move.after.combine == "sum" and index > 0 else part


def _slice(part: Tensor, dim: int, size: int, degree: int, index: int) -> Tensor:
    return _padded(part, dim, degree * size).narrow(dim, index * size, size)


def _padded(part: Tensor, dim: int, size: int) -> Tensor:
    """With zeros at the end of a dimension."""
    if part.shape[dim] == size:
        return part
    behind = [0, 0] * (part.dim() - 1 - dim) + [0, size - part.shape[dim]]
    return pad(part, behind)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Truth values as bytes, in the same memory: gloo and NCCL do not know them."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
