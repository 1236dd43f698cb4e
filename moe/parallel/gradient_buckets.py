"""Buckets of gradients that are reduced in one collective, and those collectives in progress."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.parallel.collective import collective
from moe.parallel.mesh import DATA_AXES, Layout
from moe.parallel.optimizer_shards import OptimizerShard, ShardRows
from moe.parallel.parameters import LocalParameter
from moe.parallel.row_collectives import reduce_scatter

_ALL_REDUCE = "all-reduce of gradients"
_ALIGNMENT = 128
"""Bytes that divide the offset of each gradient in its bucket, for kernels that write to it in the next step."""


class PendingReduction(ABC):
    """Reduction of a bucket's gradients in progress."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the sums, and set them as gradients."""


class GradientBucket(ABC):
    """Gradients of one dtype, reduced in one collective over one process group."""

    def __init__(self, group: dist.ProcessGroup, parameters: list[LocalParameter]) -> None:
        self._group, self.parameters = group, parameters

    @abstractmethod
    def start(self) -> PendingReduction:
        """Start the reduction of the parameters' gradients, zeros for those without one."""


class AllReduceBucket(GradientBucket):
    """Gradients that this rank needs whole."""

    def start(self) -> PendingReduction:
        return _PendingAllReduce(self._group, self.parameters)


class _PendingAllReduce(PendingReduction):
    """All-reduce of copies. They already replace the gradients, except those of DTensors, which get the sums in
    `finish`."""

    def __init__(self, group: dist.ProcessGroup, parameters: list[LocalParameter]) -> None:
        gradients = [local_gradient(parameter) for parameter in parameters]
        self._summed, parts = _copy(parameters, gradients)
        with collective(_ALL_REDUCE):
            work = dist.all_reduce(self._summed, group=group, async_op=True)
        assert work is not None
        self._work, self._copied_back = work, list[tuple[Tensor, Tensor]]()
        for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
            if isinstance(parameter.parameter, DTensor):
                self._copied_back.append((gradient, part))
            else:
                parameter.parameter.grad = part

    def finish(self) -> None:
        with collective(_ALL_REDUCE):
            self._work.wait()
        for gradient, part in self._copied_back:
            gradient.copy_(part)


class ReduceScatterBucket(GradientBucket):
    """Gradients of which this rank needs its shards."""

    def __init__(self, group: dist.ProcessGroup, shards: list[OptimizerShard]) -> None:
        super().__init__(group, [shard.whole for shard in shards])
        self._shards, self._rows = shards, ShardRows(shards)

    def start(self) -> PendingReduction:
        return _PendingReduceScatter(self._group, self._shards, self._rows)


class _PendingReduceScatter(PendingReduction):
    """Reduce-scatter of copies. The gradients are freed; shards get the sums, or add them, in `finish`."""

    def __init__(self, group: dist.ProcessGroup, shards: list[OptimizerShard], rows: ShardRows) -> None:
        self._shards, self._rows = shards, rows
        gradients = [shard.split(local_gradient(shard.whole)) for shard in shards]
        sent = rows.allocate(rows.num_rows)
        for index, row in enumerate(sent):
            torch._foreach_copy_(rows.views(row, index), [parts[index] for parts in gradients])
        for shard in shards:
            shard.whole.parameter.grad = shard.whole.local.grad = None
        self._wait = reduce_scatter(sent, group, "reduce-scatter of gradients")

    def finish(self) -> None:
        sums = self._rows.views(self._wait(), self._shards[0].index)
        for shard, shard_sum in zip(self._shards, sums, strict=True):
            local = shard.shard.local
            if local.grad is None:
                local.grad = shard_sum
            else:
                local.grad.add_(shard_sum)


def local_gradient(parameter: LocalParameter) -> Tensor:
    """This rank's gradient, which is set to zeros if there is none."""
    gradient = parameter.parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter.local, requires_grad=False)
    elif isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    parameter.local.grad = gradient
    return gradient


def gradient_buckets(
    parameters: Sequence[LocalParameter],
    layout: Layout,
    max_bytes: int,
    shards: Mapping[str, OptimizerShard] | None = None,
) -> Iterator[GradientBucket]:
    """Buckets of the parameters whose gradients are reduced, in reverse order: reduce-scattered if they have `shards`,
    by name, or else all-reduced. A parameter larger than `max_bytes` is alone in its bucket."""
    shards = shards or {}
    partial: dict[tuple[dist.ProcessGroup, bool, torch.dtype], list[LocalParameter]] = {}

    def bucket(group: dist.ProcessGroup, parameters: list[LocalParameter]) -> GradientBucket:
        if parameters[0].name in shards:
            return ReduceScatterBucket(group, [shards[parameter.name] for parameter in parameters])
        return AllReduceBucket(group, parameters)

    for parameter in reversed(parameters):
        shard = shards.get(parameter.name)
        group = layout.reduction_group(*(_reduction_axes(parameter) if shard is None else (shard.axis,)))
        if group is None:
            continue
        if _aligned_bytes(parameter) > max_bytes:
            yield bucket(group, [parameter])
            continue
        members = partial.setdefault((group, shard is None, parameter.local.dtype), [])
        if sum(map(_aligned_bytes, [*members, parameter])) > max_bytes:
            yield bucket(group, [*members])
            members.clear()
        members.append(parameter)
    for (group, *_), members in partial.items():
        yield bucket(group, members)


def _copy(parameters: list[LocalParameter], gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(this rank's gradients in one tensor; parts of it, in the parameters' memory order)."""
    first, parts, offset = parameters[0].local, list[Tensor](), 0
    num_bytes = sum(map(_aligned_bytes, parameters))
    summed = torch.empty(num_bytes // first.itemsize, dtype=first.dtype, device=first.device)
    for parameter in parameters:
        local = parameter.local
        # The same order on all ranks, unlike the gradients'.
        strides = torch.empty_like(local, device="meta").stride()
        parts.append(summed.as_strided(local.shape, strides, offset))
        offset += _aligned_bytes(parameter) // local.itemsize
    torch._foreach_copy_(parts, gradients)
    return summed, parts


def _aligned_bytes(parameter: LocalParameter) -> int:
    return -(-parameter.local.nbytes // _ALIGNMENT) * _ALIGNMENT


def _reduction_axes(parameter: LocalParameter) -> tuple[str, ...]:
    """Axes along which ranks have the same part of a parameter and gradients of different tokens, or of the same after
    a reduce-scatter over FSDP's axis. FSDP itself sums over its replicas."""
    part, by_fsdp = parameter.part, isinstance(parameter.parameter, DTensor)
    if part.of_experts:
        replica_axes: tuple[str, ...] = ("expert_replica", "expert_fsdp")
        if "expert_fsdp" in part.axes:
            replica_axes = () if by_fsdp else ("expert_replica",)
        # A parameter that is not split over expert_tensor is used on each rank with a different part of the expert.
        return replica_axes if "expert_tensor" in part.axes else (*replica_axes, "expert_tensor")
    axes: tuple[str, ...] = (*DATA_AXES, "context")
    if "fsdp" in part.axes:
        axes = ("context_replica",) if by_fsdp else ("data_replica", "context_replica")
    return (*axes, "tensor") if part.shares_tokens and "tensor" not in part.axes else axes
