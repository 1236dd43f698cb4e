"""Norms over the last dimensions: rows are independent, and gradients of weights are sums over rows."""

from typing import Any

import torch
from torch import fx

from moe.sharding.operands import operands, results, shape_of
from moe.sharding.rules.dims import factor_dims, sizes_of, unsplit
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Rule

aten = torch.ops.aten


def norm(node: fx.Node) -> Rule:
    """Rule of a norm or its gradient. Tensors with as many dimensions as the input have its rows; others are
    weights."""
    is_backward = node.target in (aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
    shape = shape_of(operands(node)[1 if is_backward else 0])
    normalized_shape: Any = node.args[2 if is_backward else 1]
    num_rows = len(shape) - len(normalized_shape)
    rows = factor_dims(shape[:num_rows])

    def dims_of(tensor_shape: tuple[int, ...]) -> Dims:
        is_weight = len(tensor_shape) < len(shape) or num_rows == 0
        return unsplit(tensor_shape) if is_weight else (*rows, *unsplit(normalized_shape))

    return Rule(
        operands=tuple(dims_of(shape_of(operand)) for operand in operands(node)),
        results=tuple(dims_of(tuple(result.shape)) if result is not None else () for result in results(node)),
        sizes=sizes_of((rows, shape[:num_rows])),
        combine={factor: "sum" for factors in rows for factor in factors} if is_backward else {},
        linear=(frozenset({0}),) if is_backward else (),
        lower=LocalCall.contiguous,
    )


RULES = {
    aten.native_layer_norm.default: norm,
    aten.native_layer_norm_backward.default: norm,
    aten._fused_rms_norm.default: norm,
    aten._fused_rms_norm_backward.default: norm,
}
