"""Gradients of an applied module clipped by their norm over all ranks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from moe.sharding import torch_private
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.parameters import APPLIED, ParameterPart, is_cut, noted_part


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients of an applied module's parameters so that their norm, over all ranks, is at most `max_norm`, as
    `torch.nn.utils.clip_grad_norm_` does; the norm before that, the same on every rank. All ranks call it.

    Raises ValueError for parameters of another module, RuntimeError for a norm that is not finite, where that is asked
    for; then no gradient is changed.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    parts = [part for each in given if (part := noted_part(each)) is not None]
    if len(parts) < len(given) or len({id(each.applied) for each in parts}) > 1:
        raise ValueError("clip_grad_norm_ takes parameters of one module that sharding.apply gave")
    if not norm_type > 0:
        raise ValueError(f"norm_type (={norm_type}) must be above 0; use 1.0, 2.0 or float('inf')")
    gradients = [(part, each.grad) for part, each in zip(parts, given, strict=True) if each.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    total = _total(gradients, float(norm_type), parts[0].applied.mesh)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients (={float(total)}) is not finite, so they cannot be "
            "clipped; pass error_if_nonfinite=False to scale them by it anyway"
        )
    scale = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return total


def _total(gradients: list[tuple[ParameterPart, Tensor]], norm_type: float, mesh: Mesh) -> Tensor:
    """Of parts that several ranks have, the first rank's counts."""
    device, dtype = gradients[0][1].device, gradients[0][1].dtype
    largest = math.isinf(norm_type)
    counted = torch.zeros(
        2, dtype=torch.float64, device=device
    )  # what is combined; whether some is no number
    for part, gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
        if not part.is_first or not gradient.numel():
            continue
        precise = torch.promote_types(gradient.dtype, torch.float32)
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=precise).to(device, torch.float64)
        if largest:
            # A largest value of several ranks need not be NaN where one of theirs is.
            found = torch.stack([norm.nan_to_num(0.0, posinf=math.inf), norm.isnan().to(norm)])
            counted = torch.maximum(counted, found)
        else:
            counted[0] += norm**norm_type
    for axis in range(len(mesh.degrees)):
        counted = mesh.all_reduce(counted, axis, "max" if largest else "sum")
    if largest:
        total = torch.where(counted[1] > 0, math.nan, counted[0])
    else:
        total = counted[0] ** (1.0 / norm_type)
    return total.to(dtype)


def _refuse_parts(tensors: list[Tensor]) -> None:
    """Raises RuntimeError where torch is about to take the norm of this rank's parts for that of the whole."""
    if not len(APPLIED):
        return
    gradients = [part.grad for applied in APPLIED for part in applied.parameters() if is_cut(part)]
    ours = {id(each) for each in gradients if each is not None}
    memory = {each.untyped_storage().data_ptr() for each in gradients if each is not None and each.numel()}
    for tensor in tensors:
        if id(tensor) in ours or (tensor.numel() and tensor.untyped_storage().data_ptr() in memory):
            raise RuntimeError(
                "torch.nn.utils would take the norm of this rank's parts of gradients; use moe.sharding.clip_grad_norm_"
            )


torch_private.before_total_norm(_refuse_parts)
