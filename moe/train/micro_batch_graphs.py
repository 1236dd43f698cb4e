"""Micro-batches as CUDA graphs: both passes of each are one launch of the host."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe.parallel import Layout, LocalParameter
from moe.parallel.accelerator import accelerator
from moe.parallel.device_graphs import GraphRecorder
from moe.spec import Problem, spec_error
from moe.tasks.task import RankBatch, Task
from moe.train.moe_layers import MoELayers
from moe.train.passes import Passes
from moe.train.totals import MicroBatchSums, StepTotals

WARM_UP_PASSES = 2
"""Micro-batches of each shape computed without a graph: the first compiles kernels, the second finds them compiled."""
MAX_GRAPHS = 8
"""Most graphs. Micro-batches of further shapes are computed without one."""
_COMMUNICATING_AXES = ("expert", "expert_tensor", "tensor", "fsdp", "expert_fsdp", "context", "pipeline")
"""Axes over which the passes of a micro-batch have collectives."""


@dataclass(frozen=True)
class _MicroBatchGraph:
    inputs: list[Tensor]
    sums: MicroBatchSums
    replay: Callable[[], None]


class MicroBatchGraphs(Passes):
    """Computes micro-batches by one graph per combination of input shapes, recorded after `WARM_UP_PASSES`.

    Gradients keep their memory from step to step, since graphs add to it. A rank that
    cannot record a graph computes nothing more, and joins the collectives of the step, at whose end all ranks learn
    of its `problems`.
    """

    def __init__(
        self,
        task: Task[Any, Any],
        layout: Layout,
        model: nn.Module,
        parameters: list[LocalParameter],
        moe_layers: MoELayers,
    ) -> None:
        """Raises SpecError for CPUs, and for layouts in which passes communicate."""
        _check(layout)
        self._task, self._model, self._moe_layers = task, model, moe_layers
        self._parameters = [parameter.local for parameter in parameters if parameter.local.requires_grad]
        self._gradients = [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters]
        self._device, self._recorder = layout.device, GraphRecorder(layout.device)
        self._names_of_means: tuple[str, ...] = ()
        self._num_warm_ups: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _MicroBatchGraph] = {}
        self.problems: list[Problem] = []
        """Reasons why graphs could not be recorded: a pass waits for the device or copies from the host, which a replay
        would not repeat."""

    @torch.no_grad()
    def discard_gradients(self) -> None:
        """Set all gradients to zeros, in the memory that graphs add to."""
        torch._foreach_zero_(self._gradients)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def add_gradients(self, batch: RankBatch[Any], totals: StepTotals) -> None:
        for micro_batch in batch.micro_batches:
            totals.add_sums(self._add_gradients(micro_batch, batch.num_targets))

    def _add_gradients(self, micro_batch: Any, num_targets: int) -> MicroBatchSums:
        """Add the gradients of both passes of a micro-batch, whose loss is divided by `num_targets`. The result's
        tensors are valid until the next call. Undefined once there are `problems`."""
        if self.problems:
            return self._no_sums()
        inputs = self._task.graph_inputs(micro_batch, num_targets)
        tensors = list(_tensors_of(inputs))
        key = _shape_of(inputs)
        graph = self._graphs.get(key)
        if graph is None:
            num_warm_ups = self._num_warm_ups.get(key, 0)
            if num_warm_ups < WARM_UP_PASSES or len(self._graphs) == MAX_GRAPHS:
                self._num_warm_ups[key] = num_warm_ups + 1
                sums = self._recorder.warm_up(lambda: self._both_passes(*inputs))
                self._names_of_means = tuple(sums.means)
                return sums
            graph = self._record(inputs, tensors)
            if graph is None:
                return self._no_sums()
            self._graphs[key] = graph
        torch._foreach_copy_(graph.inputs, tensors)
        graph.replay()
        return graph.sums

    def _record(self, inputs: tuple[Any, Tensor], tensors: list[Tensor]) -> _MicroBatchGraph | None:
        """The graph; None, and one of `problems`, if it cannot be recorded."""
        copies = [tensor.clone() for tensor in tensors]
        copied_inputs = _with_tensors(inputs, iter(copies))
        try:
            sums, replay = self._recorder.record(lambda: self._both_passes(*copied_inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            rule = f"requires micro-batches of which the host reads nothing ({error})"
            self.problems += spec_error("unsupported", "train.cuda_graphs", True, rule, "omit it").problems
            return None
        return _MicroBatchGraph(copies, sums, replay)

    def _no_sums(self) -> MicroBatchSums:
        """Zeros, with the means that other ranks sum."""
        means = {name: torch.zeros(2, device=self._device) for name in self._names_of_means}
        return MicroBatchSums(torch.zeros(3, device=self._device), (), None, {}, means, None)

    def _both_passes(self, micro_batch: Any, num_targets: Tensor) -> MicroBatchSums:
        with self._moe_layers.routings() as routings:
            loss = self._task.loss(self._model, micro_batch)
        (loss.objective / num_targets).backward()
        return MicroBatchSums.of(loss, routings, self._moe_layers.max_experts)


def _check(layout: Layout) -> None:
    def conflict(rule: str, remedy: str) -> Exception:
        return spec_error("conflict", "train.cuda_graphs", True, rule, remedy)

    if accelerator(layout.device).kind == "cpu":
        raise conflict("requires GPUs, but the workers compute on CPUs", "omit it")
    axes = [axis for axis in _COMMUNICATING_AXES if layout.degrees.get(axis, 1) > 1]
    if axes:
        degrees = ", ".join(f"{axis} {layout.degrees[axis]}" for axis in axes)
        raise conflict(f"requires micro-batches that do not communicate, but the plan has {degrees}",
                       "omit it, or set these degrees in parallel to 1")  # fmt: skip


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors in nested tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, part in _parts_of(value):
        yield from _tensors_of(part)


def _shape_of(value: Any) -> Hashable:
    """`value` with the shape and dtype in place of each tensor."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if parts := _parts_of(value):
        return tuple(_shape_of(part) for _, part in parts)
    return value


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with other tensors, in the order of `_tensors_of`."""
    if isinstance(value, Tensor):
        return next(tensors)
    parts = {name: _with_tensors(part, tensors) for name, part in _parts_of(value)}
    if isinstance(value, tuple):
        return tuple(parts.values())
    return replace(value, **parts) if parts else value


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, tuple):
        return [(str(index), part) for index, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []
