"""Norm and clipping of gradients over the mesh."""

import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel.buffers import buffers_of
from moe.parallel.collective import collective
from moe.parallel.mesh import Layout
from moe.parallel.parameters import LocalParameter


def discard_gradients(parameters: list[LocalParameter]) -> None:
    """Discard gradients before a step, reusing their memory. A model's own `zero_grad` misses parameters that are
    currently gathered."""
    for local_parameter in parameters:
        if (buffers := buffers_of(local_parameter.parameter)) is not None:
            buffers.return_buffer(local_parameter.parameter.grad)
        local_parameter.parameter.grad = local_parameter.local.grad = None


@torch.no_grad()
def global_norm(parameters: list[LocalParameter], layout: Layout) -> Tensor:
    """Norm of all gradients (float64 scalar), the same on every rank. Call after `reduce_gradients`. Collective."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.local.requires_grad:
            continue
        assert parameter.local.grad is not None, "reduce_gradients gives every trained parameter a gradient"
        copies = layout.copies(*parameter.part.axes) * parameter.part.stage_copies
        if parameter.part.offsets is not None:
            if not parameter.part.is_first:
                continue
            copies = 1
        by_copies.setdefault(copies, []).append(parameter.local.grad)
    squares = torch.zeros((), dtype=torch.float64, device=layout.device)
    for copies, gradients in by_copies.items():  # each rank adds its share of replicated parts
        norms = torch.stack(torch._foreach_norm(gradients))
        squares += norms.to(torch.float64).square().sum() / copies
    if layout.world_group is not None:
        with collective("all-reduce of the gradients' norm"):
            dist.all_reduce(squares, group=layout.world_group)
    return squares.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that scales gradients with global norm `norm` down to `max_norm`; 1 if the norm is not finite, so that the
    gradients still show the cause."""
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


@torch.no_grad()
def scale_gradients(parameters: list[LocalParameter], factor: Tensor) -> None:
    """Multiply all gradients by a scalar in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in (parameter.local.grad for parameter in parameters):
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype))
