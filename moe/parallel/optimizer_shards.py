"""Optimizer state sharded over ranks that all have whole parameters (ZeRO stages 1 and 2, arXiv 1910.02054).

Each rank of an FSDP axis updates its shard of a parameter, has optimizer state for that shard alone, and gathers the
shards that the other ranks updated.

Weights that are only used rounded to a narrower compute dtype need no whole float32 values: their masters are optimizer
state, and sharded like it (`shard_masters`). The whole weight is then the narrow copy, which ranks gather.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel.buffers import buffers_of, keep_buffers, values_changed
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
    """Shares memory with `whole` where it is contiguous there, as optimizers need it; else it is a copy, or the master
    values of a narrow weight."""
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
    def is_master(self) -> bool:
        """Whether `whole` has only narrow values."""
        buffers = buffers_of(self.whole.parameter)
        return buffers is not None and buffers.replacement is not None

    @property
    def is_copy(self) -> bool:
        """Whether `shard` is a copy of a part of `whole`."""
        return not self.is_master and not self.split(self.whole.local.detach())[self.index].is_contiguous()

    @property
    def values(self) -> Tensor:
        """Values of `whole`: narrow ones if this is a master."""
        buffers = buffers_of(self.whole.parameter)
        narrow = None if buffers is None else buffers.replacement
        return self.whole.local.detach() if narrow is None else narrow

    @torch.no_grad()
    def shard_master(self, dtype: torch.dtype) -> None:
        """Copy the shard's values from `whole`, whose own values are replaced by narrow ones in `dtype`."""
        buffers = buffers_of(self.whole.parameter)
        assert buffers is not None, "sharded parameters have buffers"
        self.shard.local.data = self.split(self.whole.local.detach())[self.index].clone()
        buffers.replace_by_narrow(self.whole.parameter, dtype)


class ShardRows:
    """Rows of memory for collectives, one for each rank of an axis: that rank's shards of several parameters, end to
    end. All rows have the length of rank 0's, whose shards are the largest."""

    def __init__(self, shards: Sequence[OptimizerShard], like: Tensor | None = None) -> None:
        """`like`: a tensor of the rows' dtype; by default, that of the parameters."""
        self._like = shards[0].whole.local if like is None else like
        self._shapes, self._offsets = list[list[torch.Size]](), list[int]()
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
        self._layout = layout
        keep_buffers([shard.whole for shard in self.sharded], layout)
        self._set_up_gathers()

    def _set_up_gathers(self) -> None:
        """Decide which shards are copied before an update, and which are gathered together after it."""
        self._copied = [shard for shard in self.sharded if shard.is_copy]
        self._gathers = [_Gather(bucket, self._layout) for bucket in _buckets(self.sharded)]

    def shard_masters(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Replace those of the sharded parameters with these names by their values in `dtype`, if that is narrower;
        the wide values stay in the shards. To be called once their initial values are complete. Modules must use them
        by `narrow` or `cast_parameter` only."""
        for shard in self.sharded:
            if shard.whole.name in names and dtype.itemsize < shard.whole.local.itemsize:
                shard.shard_master(dtype)
        self._set_up_gathers()

    def with_masters(self, parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
        """The parameters, with this rank's shards of those of which only a shard has wide values."""
        masters = {shard.whole.name: shard.shard for shard in self.sharded if shard.is_master}
        return [masters.get(parameter.name, parameter) for parameter in parameters]

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
        self._shards, self._rows = shards, ShardRows(shards, shards[0].values)
        group = layout.group(shards[0].axis)
        assert group is not None
        self._group: dist.ProcessGroup = group

    @torch.no_grad()
    def run(self) -> None:
        rows, own_index = self._rows, self._shards[0].index
        own_row = rows.allocate(1)[0]
        torch._foreach_copy_(rows.views(own_row, own_index), [shard.shard.local for shard in self._shards])
        wholes = [shard.split(shard.values) for shard in self._shards]
        for index, row in enumerate(all_gather(own_row, self._group, "all-gather of updated parameters")):
            torch._foreach_copy_([parts[index] for parts in wholes], rows.views(row, index))


def _buckets(shards: Sequence[OptimizerShard]) -> Iterator[list[OptimizerShard]]:
    """Shards of one axis and dtype that are gathered together: parameters of at most `BUCKET_BYTES`, or one alone."""
    partial: dict[tuple[str, torch.dtype], list[OptimizerShard]] = {}
    num_bytes: dict[tuple[str, torch.dtype], int] = {}
    for shard in shards:
        values = shard.values
        key = shard.axis, values.dtype
        if key in partial and num_bytes[key] + values.nbytes > BUCKET_BYTES:
            yield partial.pop(key)
        if key not in partial:
            partial[key], num_bytes[key] = [], 0
        partial[key].append(shard)
        num_bytes[key] += values.nbytes
    yield from partial.values()


def _split(tensor: Tensor, num_shards: int, dim: int) -> list[Tensor]:
    """Views of the shards by rank, as by `torch.chunk`; the last ones may be empty."""
    shards = list(tensor.chunk(num_shards, dim))
    return shards + [tensor.narrow(dim, 0, 0)] * (num_shards - len(shards))
