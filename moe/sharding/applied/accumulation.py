"""A step over micro-batches under autograd. Gradients are computed in the forward call, so that a micro-batch's
activations are freed before the next one's are computed; the backward call scales the gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.partition.loop import LoopProgram, loop_over_micro_batches
from moe.sharding.partition.program import Program


@dataclass(frozen=True, eq=False)
class AccumulationPrograms:
    """The loops over micro-batches of a program: with and without the backward pass."""

    training: LoopProgram | None
    """Loop with the backward pass; None for a program without one."""
    forward: LoopProgram
    loss: int
    """Number of the output that is the loss."""

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """Graphs of both loops."""
        programs = [program for program in (self.training, self.forward) if program is not None]
        return [graph for program in programs for graph in (program.prologue, program.body, program.epilogue)]

    def __call__(
        self,
        mesh: Mesh,
        tensors: Sequence[Tensor],
        num_results: int,
        gradients_of: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    ) -> tuple[Tensor, ...]:
        """Returns the outputs and new values of buffers, `num_results` together. `gradients_of` converts the program's
        gradients to those of `tensors`."""
        if self.training is None or not torch.is_grad_enabled():
            return self.forward(mesh, [tensor.detach() for tensor in tensors])
        return _AccumulatedStep.apply(self, mesh, num_results, gradients_of, *tensors)


def steps_of(program: Program, capture: CapturedGraph, micro_batches: int) -> AccumulationPrograms:
    dtypes = [leaf.dtype for leaf in capture.leaves.values() if leaf.kind == "tangent"]
    dtype = dtypes[0] if dtypes else torch.float32
    training = loop_over_micro_batches(program, micro_batches, dtype, True) if program.backward is not None else None
    return AccumulationPrograms(
        training, loop_over_micro_batches(program, micro_batches, dtype, False), *(program.tangents or (0,))
    )


def check_once() -> None:
    """Called in a backward pass. Raises RuntimeError if its result is to be differentiated again."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True is not supported: a program has no second derivatives; omit it")


class _AccumulatedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, steps: AccumulationPrograms, mesh: Mesh, num_results: int, gradients_of: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        assert steps.training is not None
        outputs = steps.training(mesh, [tensor.detach() for tensor in tensors])
        results, gradients = outputs[:num_results], gradients_of(outputs[num_results:])
        ctx.has_gradient = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.loss = steps.loss
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[: ctx.loss], *results[ctx.loss + 1 :])
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        check_once()
        saved_gradients, scale = iter(ctx.saved_tensors), tangents[ctx.loss]
        gradients = [
            next(saved_gradients) * scale if has_gradient and scale is not None else None
            for has_gradient in ctx.has_gradient
        ]
        return None, None, None, None, *gradients
