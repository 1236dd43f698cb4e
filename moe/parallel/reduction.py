"""All-reduces of gradients, in buckets, overlapped with the last backward pass of a step.

Losses are sums over a rank's tokens divided by global counts, so gradients are summed and never averaged. An expert's
gradient already includes the tokens of its whole expert group, from the all-to-all, so it is summed only over ranks
with the same part of the same expert. FSDP sums gradients over its sharding and replica ranks.

As in DistributedDataParallel (arXiv 2006.15704), a bucket is copied and summed as soon as the backward pass has
completed its gradients, in reverse order of the parameters. The copies then take the place of the gradients, whose
memory the pass may still read. Buckets and their order are the same on all ranks and in every run.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from moe.parallel.collective import collective
from moe.parallel.mesh import DATA_AXES, Layout
from moe.parallel.parameters import LocalParameter, ParameterShard
from moe.plan.profile import BUCKET_BYTES

_NAME = "all-reduce of gradients"
_ALIGNMENT = 128
"""Bytes that divide the offset of each gradient in its bucket, for kernels that write to it in the next step."""


@dataclass
class _GradientBucket:
    """Gradients of one dtype, summed in one collective."""

    group: dist.ProcessGroup
    parameters: list[LocalParameter] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, parameter: LocalParameter) -> None:
        self.parameters.append(parameter)
        self.num_bytes += _aligned_bytes(parameter)

    def copy(self, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(this rank's gradients in one tensor; parts of it, in the parameters' memory order)."""
        first = self.parameters[0].local
        summed = torch.empty(self.num_bytes // first.itemsize, dtype=first.dtype, device=first.device)
        parts, offset = list[Tensor](), 0
        for parameter in self.parameters:
            local = parameter.local
            # The same order on all ranks, unlike the gradients'.
            strides = torch.empty_like(local, device="meta").stride()
            parts.append(summed.as_strided(local.shape, strides, offset))
            offset += _aligned_bytes(parameter) // local.itemsize
        torch._foreach_copy_(parts, gradients)
        return summed, parts


class _PendingSum:
    """All-reduce in progress of copies. They already replace the gradients, except those of DTensors, which get the
    sums in `finish`."""

    def __init__(self, bucket: _GradientBucket) -> None:
        gradients = [_local_gradient(parameter) for parameter in bucket.parameters]
        self._summed, parts = bucket.copy(gradients)
        with collective(_NAME):
            work = dist.all_reduce(self._summed, group=bucket.group, async_op=True)
        assert work is not None
        self._work, self._copied_back = work, list[tuple[Tensor, Tensor]]()
        for parameter, gradient, part in zip(bucket.parameters, gradients, parts, strict=True):
            if isinstance(parameter.parameter, DTensor):
                self._copied_back.append((gradient, part))
            else:
                parameter.parameter.grad = part

    def finish(self) -> None:
        with collective(_NAME):
            self._work.wait()
        for gradient, part in self._copied_back:
            gradient.copy_(part)


class GradientReduction:
    """Sums the trainable parameters' local gradients over the global batch, once per step. A parameter without a
    gradient gets zeros, not None: its optimizer state must change as on one process.

    What FSDP leaves to sum is summed after the backward pass. The modules of `moe.sharding` sum their own gradients.
    """

    def __init__(self, parameters: list[LocalParameter], layout: Layout) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.local.requires_grad]
        plain, sharded = ([parameter for parameter in self._parameters
                           if isinstance(parameter.parameter, DTensor) == is_sharded]
                          for is_sharded in (False, True))  # fmt: skip
        self._overlapped_buckets = [*_buckets(plain, layout)]
        self._buckets = [*self._overlapped_buckets, *_buckets(sharded, layout)]
        reduced_names = {parameter.name for bucket in self._buckets for parameter in bucket.parameters}
        self._local_parameters = [parameter for parameter in self._parameters if parameter.name not in reduced_names]
        self._pending = list[_PendingSum]()
        self._incomplete: list[set[str]] | None = None
        """By overlapped bucket, names of the parameters whose gradients are still missing; None outside the last pass.
        """
        self._nodes: list[Any] | None = None

    @contextmanager
    def overlapping_backward(self) -> Iterator[None]:
        """Context of the last backward pass of a step, in which each bucket is summed as soon as its gradients are
        complete. After an error there, the step cannot be finished."""
        if self._pending:
            raise RuntimeError("the gradients of the last step are not finished; call finish after its backward passes")
        if self._nodes is None:
            self._nodes = self._register_hooks()
        self._incomplete = [{parameter.name for parameter in bucket.parameters} for bucket in self._overlapped_buckets]
        try:
            yield
        except BaseException:
            self._pending.clear()
            raise
        finally:
            self._incomplete = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the other gradients, and wait for all sums. All ranks call it together."""
        try:
            for bucket in self._buckets[len(self._pending) :]:
                self._pending.append(_PendingSum(bucket))
            for pending in self._pending:
                pending.finish()
        finally:
            self._pending.clear()
        for parameter in self._local_parameters:
            _local_gradient(parameter)

    def _register_hooks(self) -> list[Any]:
        """Hooks on the nodes that accumulate gradients. Autograd holds these nodes weakly, so they are kept here; their
        hooks refer to this object weakly, since a cycle through autograd would never be freed."""
        complete = weakref.WeakMethod(self._complete)
        return [
            _on_completion(parameter, complete, index)
            for index, bucket in enumerate(self._overlapped_buckets)
            for parameter in bucket.parameters
        ]

    @torch.no_grad()
    def _complete(self, index: int, name: str) -> None:
        """Autograd has accumulated the gradient of the parameter `name`, which is in the bucket `index`."""
        if self._incomplete is None:
            return
        if name not in self._incomplete[index]:
            raise RuntimeError(
                f"the last backward pass adds to the gradient of {name} twice, and it may be summed after the first "
                "time; checkpoint with use_reentrant=False"
            )
        self._incomplete[index].remove(name)
        while len(self._pending) < len(self._overlapped_buckets) and not self._incomplete[len(self._pending)]:
            self._pending.append(_PendingSum(self._overlapped_buckets[len(self._pending)]))


def reduce_gradients(parameters: list[LocalParameter], layout: Layout) -> None:
    """Sum local gradients over the global batch after the backward pass. All ranks call it together."""
    GradientReduction(parameters, layout).finish()


def _on_completion(parameter: LocalParameter, complete: weakref.WeakMethod[Any], index: int) -> Any:
    """Register a hook on the node that accumulates the parameter's gradient, and return the node. The hook calls
    `complete` even if autograd has no gradient to add, as after accumulation in place."""

    def hook(*_: Any) -> None:
        if (method := complete()) is not None:
            method(index, name)

    name = parameter.name
    node = get_gradient_edge(parameter.parameter).node
    node.register_hook(hook)
    return node


def _local_gradient(parameter: LocalParameter) -> Tensor:
    """This rank's gradient, which is set to zeros if there is none."""
    gradient = parameter.parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter.local, requires_grad=False)
    elif isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    parameter.local.grad = gradient
    return gradient


def _buckets(parameters: list[LocalParameter], layout: Layout) -> Iterator[_GradientBucket]:
    """Buckets of the parameters whose gradients are summed, in reverse order. A parameter larger than `BUCKET_BYTES` is
    alone in its bucket."""
    partial: dict[tuple[dist.ProcessGroup, torch.dtype], _GradientBucket] = {}
    for parameter in reversed(parameters):
        group = layout.reduction_group(*_reduction_axes(parameter.part))
        if group is None:
            continue
        key, num_bytes = (group, parameter.local.dtype), _aligned_bytes(parameter)
        if num_bytes > BUCKET_BYTES:
            alone = _GradientBucket(group)
            alone.add(parameter)
            yield alone
            continue
        if key in partial and partial[key].num_bytes + num_bytes > BUCKET_BYTES:
            yield partial.pop(key)
        partial.setdefault(key, _GradientBucket(group)).add(parameter)
    yield from partial.values()


def _aligned_bytes(parameter: LocalParameter) -> int:
    return -(-parameter.local.nbytes // _ALIGNMENT) * _ALIGNMENT


def _reduction_axes(part: ParameterShard) -> tuple[str, ...]:
    """Axes along which ranks have the same part of a parameter and gradients of different tokens."""
    if part.of_experts:
        replica_axes = () if "expert_fsdp" in part.axes else ("expert_replica", "expert_fsdp")
        # A parameter that is not split over expert_tensor is used on each rank with a different part of the expert.
        return replica_axes if "expert_tensor" in part.axes else (*replica_axes, "expert_tensor")
    axes = ("context_replica",) if "fsdp" in part.axes else (*DATA_AXES, "context")
    return (*axes, "tensor") if part.shares_tokens and "tensor" not in part.axes else axes
