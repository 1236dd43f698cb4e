"""Random numbers of torch's distributions by inverse transform sampling: one uniform draw, keyed by its position, makes
one number."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Quantile = Callable[..., Tensor]
"""Quantile function of a distribution: of draws, float64 in (0, 1), and the operator's parameters."""


def normal(draws: Tensor, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
    return mean + std * (math.sqrt(2) * torch.erfinv(2 * draws - 1))


def log_normal(draws: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return normal(draws, mean, std).exp()


def exponential(draws: Tensor, rate: float = 1.0) -> Tensor:
    return -torch.log(draws) / rate


def cauchy(draws: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * torch.tan(math.pi * (draws - 0.5))


def geometric(draws: Tensor, probability: float) -> Tensor:
    """Number of trials up to the first success, at least 1."""
    return torch.ceil(torch.log(draws) / math.log1p(-probability)).clamp_min(1)


def integer(draws: Tensor, low: int, high: int) -> Tensor:
    """Integers in [low, high)."""
    return (low + torch.floor(draws * (high - low))).clamp(low, high - 1)


QUANTILES: dict[Any, Quantile] = {
    aten.randn.default: normal,
    aten.randn_like.default: normal,
    aten.normal_functional.default: normal,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.float_float: normal,
    aten.log_normal.default: log_normal,
    aten.exponential.default: exponential,
    aten.cauchy.default: cauchy,
    aten.geometric.default: geometric,
    aten.randint.default: integer,
    aten.randint.low: integer,
    aten.randint_like.default: integer,
    aten.randint_like.low_dtype: integer,
}
"""Distributions by torch's operators."""

DISTRIBUTIONS = {quantile.__name__: quantile for quantile in QUANTILES.values()}

_SHAPE_ONLY = {aten.randn.default, aten.randn_like.default}
_WITH_SHAPE_LAST = {aten.normal.float_float, aten.randint.default, aten.randint.low}
_LIKE = {
    aten.normal_functional.default, aten.log_normal.default, aten.exponential.default, aten.cauchy.default,
    aten.geometric.default, aten.randint_like.default, aten.randint_like.low_dtype,
}  # fmt: skip


def parameters(node: fx.Node, arguments: list[Any]) -> list[Any]:
    """Parameters of an operator's distribution, in the order its quantile function takes them, from the operator's
    arguments, whose tensors are this rank's parts."""
    if node.target in _SHAPE_ONLY:
        return []
    if node.target in _LIKE:
        arguments = arguments[1:]
    if node.target in _WITH_SHAPE_LAST:
        arguments = arguments[:-1]
    is_upper_bound_alone = node.target in (aten.randint.default, aten.randint_like.default)
    return [0, *arguments] if is_upper_bound_alone else arguments


def values(distribution: str, draws: Tensor, parameters: list[Any], dtype: torch.dtype) -> Tensor:
    """Random numbers of the named distribution from draws, float64 in [0, 1)."""
    inside = (draws + 2.0**-54).clamp_max(1 - 2.0**-53)
    numbers = DISTRIBUTIONS[distribution](inside, *parameters).to(dtype)
    if distribution == "exponential":  # its logarithm must be finite, in narrow dtypes too
        numbers = numbers.clamp_min(torch.finfo(dtype).tiny)
    return numbers
