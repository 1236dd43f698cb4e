"""Decomposition of variances into sums: sums over parts of a batch add up, so statistics of a split batch are those of
the whole batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = [index % max(1, x.dim()) for index in dim] if dim else list(range(x.dim()))
    count = math.prod(x.shape[index] for index in dims)
    mean = x.mean(dims, True)
    spread = x - mean
    divisor = max(0.0, count - (1 if correction is None else correction))
    var = (spread * spread).sum(dims, keepdim) / divisor
    return var, mean if keepdim else mean.squeeze(dims)


def _var(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var_mean(x, dim, **options)[0]


def _std(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    return _var(x, dim, **options).sqrt()


def _std_mean(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, **options)
    return var.sqrt(), mean


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten.std_mean.correction: _std_mean,
}
