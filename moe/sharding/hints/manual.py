"""Parts of a module that the user partitions manually (GShard, arXiv 2006.16668, section 3.2): functions of local parts
of tensors, within a module that is partitioned automatically."""

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.sharding.hints.annotate import is_capturing
from moe.sharding.hints.hints import Hint, Partial
from moe.sharding.lines import line_of
from moe.spec import spec_error

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class ManualPart:
    """A function, and the placements of its arguments and results."""

    name: str
    function: Function
    arguments: tuple[Hint, ...]
    results: tuple[Hint | Partial, ...]
    line: str
    """The user's line that calls it."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results for one rank's parts."""
        output = self.function(*tensors)
        results = [output] if isinstance(output, Tensor) else list(output)
        if len(results) != len(self.results):
            rule = f"returns {len(results)} tensors, but out_placements has {len(self.results)}"
            remedy = "use one placement per result"
            raise spec_error("mismatch", self.line, self.name, rule, remedy)
        return results

    def gradients(self, tensors: Sequence[Tensor], result_gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the arguments, from the arguments and the gradients of the results. The function is run
        again."""
        with torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_(tensor.dtype.is_floating_point or tensor.dtype.is_complex)
                for tensor in tensors
            ]
            results = self(leaves)
            pairs = [pair for pair in zip(results, result_gradients, strict=True) if pair[0].requires_grad]
            differentiable_leaves = [leaf for leaf in leaves if leaf.requires_grad]
            gradients = iter(
                torch.autograd.grad(
                    [result for result, _ in pairs],
                    differentiable_leaves,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
                if pairs and differentiable_leaves
                else [None] * len(differentiable_leaves)
            )
        leaf_gradients = [next(gradients) if leaf.requires_grad else None for leaf in leaves]
        return [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, leaf_gradients, strict=True)]


PARTS: ContextVar[dict[str, ManualPart]] = ContextVar("parts")
"""Manual parts of the module that is being captured, by name."""


def manual(function: Function, in_placements: Sequence[Hint], out_placements: Sequence[Hint | Partial]) -> Function:
    """The function, to be called on tensors. In a partitioned module it is called on local parts with these placements;
    on one device, on whole tensors. All tensors that it uses must be arguments; it may call collectives.

    Its gradients are computed on each rank, by running it again. Along a mesh axis on which an argument is whole and a
    result is not, the ranks' gradients of that argument are summed. Raises SpecError for an invalid placement.
    """
    _check("in_placements", in_placements, Hint)
    _check("out_placements", out_placements, Hint | Partial)

    def run(*tensors: Tensor) -> Any:
        if not is_capturing():
            return function(*tensors)
        parts = PARTS.get()
        name = f"{getattr(function, '__qualname__', type(function).__name__)}.{len(parts)}"
        line = line_of(sys._getframe(1)) or f"manual part {name}"
        if len(tensors) != len(in_placements):
            rule = f"gets {len(tensors)} tensors, but in_placements has {len(in_placements)}"
            remedy = "use one placement per argument"
            raise spec_error("mismatch", line, name, rule, remedy)
        parts[name] = ManualPart(name, function, tuple(in_placements), tuple(out_placements), line)
        results = torch.ops.shardyard.manual(list(tensors), name)
        return results[0] if len(results) == 1 and len(out_placements) == 1 else tuple(results)

    return run


def _check(name: str, placements: Any, kinds: Any) -> None:
    is_list = isinstance(placements, Sequence) and not isinstance(placements, str)
    if not is_list or not all(isinstance(placement, kinds) for placement in placements):
        line = line_of(sys._getframe(2)) or "sharding.manual"
        choices = "Split, Replicate, Shard or Devices" + (", or Partial for a result" if kinds != Hint else "")
        rule, remedy = f"is passed as {name}, which must be a list of placements", f"use one per tensor: {choices}"
        raise spec_error("wrong_type", line, placements, rule, remedy)


@torch.library.custom_op("shardyard::manual", mutates_args=())
def _manual(tensors: list[Tensor], part: str) -> list[Tensor]:
    return [result.clone() for result in PARTS.get()[part](tensors)]


@_manual.register_fake
def _(tensors: list[Tensor], part: str) -> list[Tensor]:
    return [
        torch.empty(result.shape, dtype=result.dtype, device=result.device) for result in PARTS.get()[part](tensors)
    ]


@torch.library.custom_op("shardyard::manual_backward", mutates_args=())
def _manual_backward(tensors: list[Tensor], gradients: list[Tensor], part: str) -> list[Tensor]:
    return PARTS.get()[part].gradients(tensors, gradients)


@_manual_backward.register_fake
def _(tensors: list[Tensor], gradients: list[Tensor], part: str) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.part = inputs
    ctx.save_for_backward(*tensors)
    ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in output]


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    tensors = list(ctx.saved_tensors)
    result_gradients = [
        torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
        for gradient, (shape, dtype, device) in zip(gradients, ctx.shapes, strict=True)
    ]
    tensor_gradients = torch.ops.shardyard.manual_backward(tensors, result_gradients, ctx.part)
    return [
        gradient if x.dtype.is_floating_point else None for gradient, x in zip(tensor_gradients, tensors, strict=True)
    ], None


_manual.register_autograd(_backward, setup_context=_keep)
FORWARD, BACKWARD = torch.ops.shardyard.manual.default, torch.ops.shardyard.manual_backward.default
