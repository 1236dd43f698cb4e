"""Optimizer state sharded over ranks that all have whole parameters (ZeRO stages 1 and 2, arXiv 1910.02054).

Each rank of an FSDP axis updates its shard of a parameter, has optimizer state for that shard alone, and gathers the
shards that the other ranks updated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel.buffers import keep_buffers, values_changed
from moe.parallel.mesh import Layout
from moe.parallel.parameters import LocalParameter, split_further
from moe.parallel.row_collectives import all_gather
from moe.plan.profile import BUCKET_BYTES

_ALIGNMENT = 128
"""Bytes that divide the offset of each shard in a row, for kernels that read it."""


@dataclass(frozen=True)
class OptimizerShard:
    """Shard of a parameter that this rank updates."""

    whole: LocalParameter
    shard: LocalParameter
    """Shares memory with `whole` where it is contiguous there, as optimizers need it; else it is a copy."""
    axis: str
    """FSDP's axis, whose ranks have the other shards."""
    index: int
    """This rank's index along it."""
    num_shards: int
    dim: int
    """Dimension of `whole` that is split, as by `torch.chunk`."""

    @classmethod
    def of_parameter(cls, whole: LocalParameter, layout: Layout) -> "OptimizerShard | None":
        """Return this rank's shard; None of a parameter that every rank updates alone, or that is frozen."""
        if whole.part.optimizer_split is None or not whole.local.requires_grad:
            return None
        axis, dim = whole.part.optimizer_split
        index, num_shards = layout.index(axis), layout.degree(axis)
        local = nn.Parameter(_split(whole.local.detach(), num_shards, dim)[index].contiguous())
        part = replace(split_further(whole.part, axis, dim), optimizer_split=None)
        return cls(whole, LocalParameter(whole.name, local, local, part), axis, index, num_shards, dim)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Views of the shards of a tensor in the shape of `whole`, by index along the axis."""
        return _split(tensor, self.num_shards, self.dim)

    @property
    def shares_memory(self) -> bool:
        return self.split(self.whole.local.detach())[self.index].is_contiguous()


class ShardRows:
    """Rows of memory for collectives, one for each rank of an axis: that rank's shards of several parameters, end to
    end. All rows have the length of rank 0's, whose shards are the largest."""

    def __init__(self, shards: Sequence[OptimizerShard]) -> None:
        self._like, self._shapes, self._offsets = shards[0].whole.local, list[list[torch.Size]](), list[int]()
        self.num_rows, self.num_elements = shards[0].num_shards, 0
        alignment = _ALIGNMENT // self._like.itemsize
        for shard in shards:
            shapes = [part.shape for part in shard.split(shard.whole.local.detach())]
            self._shapes.append(shapes)
            self._offsets.append(self.num_elements)
            self.num_elements += -(-shapes[0].numel() // alignment) * alignment

    def allocate(self, num_rows: int) -> Tensor:
        """Uninitialized rows `[num_rows, num_elements]`."""
        return torch.empty(num_rows, self.num_elements, dtype=self._like.dtype, device=self._like.device)

    def views(self, row: Tensor, index: int) -> list[Tensor]:
        """Views in a row of the shards of the rank at `index`."""
        return [
            row[offset : offset + shapes[index].numel()].view(shapes[index])
            for offset, shapes in zip(self._offsets, self._shapes, strict=True)
        ]


class OptimizerShards:
    """Parameters and shards that this rank updates. Sharded parameters get their gradient buffers here."""

    def __init__(self, parameters: list[LocalParameter], layout: Layout) -> None:
        by_name = {
            parameter.name: shard for parameter in parameters
            if (shard := OptimizerShard.of_parameter(parameter, layout)) is not None
        }  # fmt: skip
        self.sharded = list(by_name.values())
        self.parameters = [
            by_name[parameter.name].shard if parameter.name in by_name else parameter for parameter in parameters
        ]
        """Parameters and shards, in the order of the parameters."""
        self._copied = [shard for shard in self.sharded if not shard.shares_memory]
        keep_buffers([shard.whole for shard in self.sharded], layout)
        self._gathers = [_Gather(bucket, layout) for bucket in _buckets(self.sharded)]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context in which the values of `parameters` change. They begin with those of the whole parameters, which get
        the new ones of all ranks at the end. Collective."""
        for shard in self._copied:
            shard.shard.local.detach().copy_(shard.split(shard.whole.local.detach())[shard.index])
        yield
        for gather in self._gathers:
            gather.run()
        values_changed([shard.whole for shard in self.sharded])


class _Gather:
    """All-gather of some parameters' shards into the whole ones."""

    def __init__(self, shards: list[OptimizerShard], layout: Layout) -> None:
        self._shards, self._rows = shards, ShardRows(shards)
        group = layout.group(shards[0].axis)
        assert group is not None
        self._group: dist.ProcessGroup = group

    @torch.no_grad()
    def run(self) -> None:
        rows, own_index = self._rows, self._shards[0].index
        own_row = rows.allocate(1)[0]
        torch._foreach_copy_(rows.views(own_row, own_index), [shard.shard.local for shard in self._shards])
        wholes = [shard.split(shard.whole.local.detach()) for shard in self._shards]
        for index, row in enumerate(all_gather(own_row, self._group, "all-gather of updated parameters")):
            torch._foreach_copy_([parts[index] for parts in wholes], rows.views(row, index))


def _buckets(shards: Sequence[OptimizerShard]) -> Iterator[list[OptimizerShard]]:
    """Shards of one axis and dtype that are gathered together: parameters of at most `BUCKET_BYTES`, or one alone."""
    partial: dict[tuple[str, torch.dtype], list[OptimizerShard]] = {}
    num_bytes: dict[tuple[str, torch.dtype], int] = {}
    for shard in shards:
        key = shard.axis, shard.whole.local.dtype
        if key in partial and num_bytes[key] + shard.whole.local.nbytes > BUCKET_BYTES:
            yield partial.pop(key)
        if key not in partial:
            partial[key], num_bytes[key] = [], 0
        partial[key].append(shard)
        num_bytes[key] += shard.whole.local.nbytes
    yield from partial.values()


def _split(tensor: Tensor, num_shards: int, dim: int) -> list[Tensor]:
    """Views of the shards by rank, as by `torch.chunk`; the last ones may be empty."""
    shards = list(tensor.chunk(num_shards, dim))
    return shards + [tensor.narrow(dim, 0, 0)] * (num_shards - len(shards))
