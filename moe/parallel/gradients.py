"""Gradient reduction, norm and clipping over the mesh.

Losses are sums over a rank's tokens divided by global counts, so gradients are summed and never averaged. An expert's
gradient already includes the tokens of its whole expert group, from the all-to-all, so it is summed only over ranks
with the same part of the same expert. FSDP sums gradients over its sharding and replica ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.parallel.buffers import buffers_of
from moe.parallel.collective import collective
from moe.parallel.mesh import DATA_AXES, Layout
from moe.parallel.parameters import LocalParameter, ParameterShard


def discard_gradients(parameters: list[LocalParameter]) -> None:
    """Discard gradients before a step, reusing their memory. A model's own `zero_grad` misses parameters that are
    currently gathered."""
    for local_parameter in parameters:
        if (buffers := buffers_of(local_parameter.parameter)) is not None:
            buffers.return_buffer(local_parameter.parameter.grad)
        local_parameter.parameter.grad = local_parameter.local.grad = None


def reduce_gradients(parameters: list[LocalParameter], layout: Layout) -> None:
    """Sum local gradients over the global batch. All ranks call it together.

    A trainable parameter without a gradient gets zeros, not None: its optimizer state must change as on one process.
    Frozen parameters have none.
    """
    by_group: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for local_parameter in parameters:
        if not local_parameter.local.requires_grad:
            continue
        gradient = local_parameter.parameter.grad
        if gradient is None:
            local_parameter.local.grad = torch.zeros_like(local_parameter.local)
        elif isinstance(gradient, DTensor):
            local_parameter.local.grad = gradient.to_local()
        group = layout.group(*_reduction_axes(local_parameter.part))
        by_group.setdefault(group, []).append(local_parameter.local.grad)  # type: ignore[arg-type]
    for group, gradients in by_group.items():
        _all_reduce(gradients, group)


def _reduction_axes(part: ParameterShard) -> tuple[str, ...]:
    """Axes along which ranks have the same part of a parameter and gradients of different tokens."""
    if part.of_experts:
        replica_axes = () if "expert_fsdp" in part.axes else ("expert_replica", "expert_fsdp")
        # A parameter that is not split over expert_tensor is used on each rank with a different part of the expert.
        return replica_axes if "expert_tensor" in part.axes else (*replica_axes, "expert_tensor")
    data_axes = () if "fsdp" in part.axes else DATA_AXES
    shares_tokens = part.shares_tokens and "tensor" not in part.axes
    return (*data_axes, "context", "tensor") if shares_tokens else (*data_axes, "context")


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over a group in one collective."""
    if group is None:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with collective("all-reduce of gradients"):
        dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


@torch.no_grad()
def global_norm(parameters: list[LocalParameter], layout: Layout) -> Tensor:
    """Norm of all gradients (float64 scalar), the same on every rank. Call after `reduce_gradients`. Collective."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.local.requires_grad:
            continue
        assert parameter.local.grad is not None, "reduce_gradients gives every trained parameter a gradient"
        copies = layout.copies(*parameter.part.axes)
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
