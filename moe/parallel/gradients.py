"""Gradients over the mesh: summed where a parameter is replicated, clipped by the norm of all of them.

Losses are sums over a rank's own tokens divided by global counts, so gradients add up and are never averaged.
An expert's gradient already holds what every rank of its expert group sent it through the all-to-all, so it is
summed over the ranks that hold the same expert and over no others.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel.layout import Layout
from moe.parallel.parameters import is_expert


def _split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(dense, expert) gradients. A parameter that nothing reached has a gradient of zeros, never None: its
    optimizer state must move as it would on one process."""
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        (expert if is_expert(parameter) else dense).append(parameter.grad)
    return dense, expert


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum over a group, all tensors in one collective."""
    if group is None or not tensors:
        return
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


def reduce_gradients(model: nn.Module, layout: Layout) -> None:
    """Make every gradient that of the global batch. All ranks call it together."""
    dense, expert = _split(model)
    _all_reduce(dense, layout.world_group)
    _all_reduce(expert, layout.expert_data_group)


def _square_sum(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors)).to(torch.float64).square().sum()


@torch.no_grad()
def clip_by_global_norm(model: nn.Module, layout: Layout, max_norm: float | None) -> Tensor:
    """The norm (float64 scalar) of all gradients together, the same on every rank; scales them to `max_norm`.

    Call after `reduce_gradients`. Without `max_norm` it only measures. A norm that is no number scales nothing,
    so that whoever looks for the fault finds it in the gradient that has it.
    """
    dense, expert = _split(model)
    squares = _square_sum(expert, layout.device)
    if layout.expert_group is not None:
        dist.all_reduce(squares, group=layout.expert_group)
    norm = (_square_sum(dense, layout.device) + squares).sqrt()
    if max_norm is not None:
        scale = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(dense + expert, scale.to(dense[0].dtype))
    return norm
