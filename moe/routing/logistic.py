"""Logistic function whose results do not depend on an element's position in the tensor."""

from typing import Any

import torch
from torch import Tensor


def logistic(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in the shape and dtype of `x`, within two units in the last place.

    `torch.sigmoid` uses another formula beyond the last full SIMD vector, so the scores of equal logits, and the choice
    between two experts, could depend on the number of rows.
    """
    return _Logistic.apply(x)


class _Logistic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = (-x.abs()).exp()
        y = torch.where(x >= 0, 1.0, e) / (1 + e)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_y * y * (1 - y)
