"""Checks of callers' arguments: dense tensors, whole numbers, inference mode."""

from collections.abc import Iterable
from numbers import Integral

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_dense(value: object) -> bool:
    """Whether `value` is a strided tensor with all its elements in this process: not a meta, sparse or nested tensor,
    and not a DTensor."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_meta:
        return False
    return value.layout == torch.strided and not value.is_nested


def kind_of(value: object) -> str:
    """Dtype and layout of a tensor, or the type of another value, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if is_dense(value):
        return str(value.dtype)
    kind = "a DTensor" if isinstance(value, DTensor) else "on meta" if value.is_meta else str(value.layout)
    return f"{value.dtype}, {kind}"


def check_inference(place: str, tensor: Tensor | None, operands: Iterable[Tensor]) -> None:
    """Raise ValueError for an inference-mode tensor if gradients of any of `others` are tracked: autograd cannot save
    it for the backward pass."""
    if tensor is None or not tensor.is_inference() or not torch.is_grad_enabled():
        return
    if any(operand.requires_grad for operand in operands):
        raise ValueError(
            f"{place} (created in inference mode) must not be passed while gradients are tracked; "
            "clone it, or call under torch.no_grad()"
        )


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
