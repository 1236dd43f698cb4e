"""The logistic function, the same for equal numbers wherever they stand."""

from typing import Any

import torch
from torch import Tensor


def logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), of `x`'s shape and dtype, within two units in the last place.

    torch's own `sigmoid` computes what a tensor has beyond whole vectors of the processor by another formula. Equal
    logits could get unequal scores by that: the number of rows would decide between two experts.
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
