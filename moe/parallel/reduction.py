"""Reductions of gradients, in buckets, overlapped with backward passes.

Losses are sums over a rank's tokens divided by global counts, so gradients are summed and never averaged. An expert's
gradient already includes the tokens of its whole expert group, from the all-to-all, so it is summed only over ranks
with the same part of the same expert. FSDP sums gradients over its sharding and replica ranks.

As in DistributedDataParallel (arXiv 2006.15704), a bucket is copied and summed as soon as the backward pass has
completed its gradients, in reverse order of the parameters. The copies then take the place of the gradients, whose
memory the pass may still read. Buckets and their order are the same on all ranks and in every run.

Gradients of parameters whose optimizer state is sharded are reduce-scattered, and a rank keeps its part of the sums.
With whole gradients (ZeRO-1) that happens in the last backward pass of a step. If gradients are sharded too (ZeRO-2),
it happens in every pass, as in DeepSpeed: whole gradients are freed bucket by bucket, and the parts are added up.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from moe.parallel.collective import collective
from moe.parallel.gradient_buckets import PendingReduction, ReduceScatterBucket, gradient_buckets, local_gradient
from moe.parallel.mesh import Layout
from moe.parallel.optimizer_shards import OptimizerShard
from moe.parallel.parameters import LocalParameter
from moe.plan.profile import BUCKET_BYTES


class GradientReduction:
    """Sums the trainable parameters' local gradients over the global batch, once per step. A parameter without a
    gradient gets zeros, not None: its optimizer state must change as on one process. Of a parameter with one of
    `shards`, only that gets a gradient.

    What FSDP leaves to sum is summed after the backward pass. The modules of `moe.sharding` sum their own gradients.
    """

    def __init__(self, parameters: list[LocalParameter], layout: Layout, shards: Sequence[OptimizerShard] = ()) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.local.requires_grad]
        plain, gathered = ([parameter for parameter in self._parameters
                            if isinstance(parameter.parameter, DTensor) == is_gathered]
                           for is_gathered in (False, True))  # fmt: skip
        by_name = {shard.whole.name: shard for shard in shards}
        self._overlapped_buckets = [*gradient_buckets(plain, layout, BUCKET_BYTES, by_name)]
        self._buckets = [*self._overlapped_buckets, *gradient_buckets(gathered, layout, BUCKET_BYTES)]
        self._shard_buckets = [*gradient_buckets([shard.shard for shard in shards], layout, BUCKET_BYTES)]
        """Buckets of shards' sums, which are the same on replicas only after an all-reduce."""
        self._scatters_each_pass = layout.sharding == "gradients"
        reduced_names = {parameter.name for bucket in self._buckets for parameter in bucket.parameters}
        self._local_parameters = [parameter for parameter in self._parameters if parameter.name not in reduced_names]
        self._tied_tables = [by_name[parameter.name].shard if parameter.name in by_name else parameter
                             for parameter in self._parameters if parameter.part.stage_copies > 1]  # fmt: skip
        self._tied_tables_group = layout.tied_tables_group
        self._pending = list[PendingReduction]()
        self._incomplete: dict[int, set[str]] | None = None
        """Names of the parameters whose gradients are still missing, by number of the overlapped bucket, of those that
        the current pass reduces; None outside such passes."""
        self._nodes: list[Any] | None = None

    @contextmanager
    def overlapping_backward(self, *, is_last: bool = True) -> Iterator[None]:
        """Context of a backward pass, in which each bucket is reduced as soon as its gradients are complete: all
        buckets in the last pass of a step, and in others those that are reduced in every pass. After an error there,
        the step cannot be finished."""
        if self._pending:
            raise RuntimeError("the gradients of the last step are not finished; call finish after its backward passes")
        if self._nodes is None:
            self._nodes = self._register_hooks()
        self._incomplete = {
            number: {parameter.name for parameter in bucket.parameters}
            for number, bucket in enumerate(self._overlapped_buckets)
            if is_last or (self._scatters_each_pass and isinstance(bucket, ReduceScatterBucket))
        }
        numbers = [*self._incomplete]
        try:
            yield
        except BaseException:
            self._pending.clear()
            raise
        finally:
            self._incomplete = None
        if not is_last:
            self._finish(numbers)

    def finish(self) -> None:
        """Sum the other gradients, and wait for all sums. All ranks call it together."""
        self._finish(range(len(self._buckets)))
        for parameter in self._local_parameters:
            local_gradient(parameter)
        for pending in [bucket.start() for bucket in self._shard_buckets]:
            pending.finish()
        for parameter in self._tied_tables:
            with collective("all-reduce of the gradients of tied tables"):
                dist.all_reduce(local_gradient(parameter), group=self._tied_tables_group)

    @torch.no_grad()
    def _finish(self, numbers: Sequence[int]) -> None:
        """Reduce those of the buckets that the pass did not, and wait for all of them."""
        try:
            for number in numbers[len(self._pending) :]:
                self._pending.append(self._buckets[number].start())
            for pending in self._pending:
                pending.finish()
        finally:
            self._pending.clear()

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
        if self._incomplete is None or index not in self._incomplete:
            return
        if name not in self._incomplete[index]:
            raise RuntimeError(
                f"a backward pass adds to the gradient of {name} twice, and it may be summed after the first "
                "time; checkpoint with use_reentrant=False"
            )
        self._incomplete[index].remove(name)
        numbers = [*self._incomplete]
        while len(self._pending) < len(numbers) and not self._incomplete[numbers[len(self._pending)]]:
            self._pending.append(self._overlapped_buckets[numbers[len(self._pending)]].start())


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
