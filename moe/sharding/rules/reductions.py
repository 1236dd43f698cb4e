"""Operators that reduce dimensions: a split dimension leaves partial results."""

import math
from typing import Any

import torch
from torch import fx

from moe.sharding.operands import argument, operands, results, shape_of
from moe.sharding.placement import Combine
from moe.sharding.rules.dims import factor_dims, sizes_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Rule

aten = torch.ops.aten

_COMBINE: dict[Any, Combine] = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.mean.default: "sum",
    aten.mean.dim: "sum",
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.max.default: "max",
    aten.min.default: "min",
    aten.any.default: "max",
    aten.any.dim: "max",
    aten.any.dims: "max",
    aten.all.default: "min",
    aten.all.dim: "min",
    aten.all.dims: "min",
}


def reduced_dims(node: fx.Node) -> set[int]:
    """Dimensions of the operand that are reduced."""
    num_dims = len(shape_of(operands(node)[0]))
    dims = argument(node, 1, "dim")
    if dims is None or dims == []:
        return set(range(num_dims))
    return {dim % max(1, num_dims) for dim in ([dims] if isinstance(dims, int) else dims)}


def kept_dims(shape: tuple[int, ...], reduced_dims: set[int], result: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Dims of an operand and of a result that lacks the reduced dimensions or has them with size 1."""
    operand = factor_dims(shape)
    if len(result) == len(shape):
        return operand, tuple(() if dim in reduced_dims else factors for dim, factors in enumerate(operand))
    return operand, tuple(factors for dim, factors in enumerate(operand) if dim not in reduced_dims)


def reduction(node: fx.Node) -> Rule:
    shape, reduction_dims = shape_of(operands(node)[0]), reduced_dims(node)
    operand, result = kept_dims(shape, reduction_dims, tuple(results(node)[0].shape))
    combine = _COMBINE[node.target]
    is_mean = node.target in (aten.mean.default, aten.mean.dim)
    is_linear = combine != "sum" or operands(node)[0].meta["val"].dtype != torch.bool
    return Rule(
        operands=(operand,),
        results=(result,),
        sizes=sizes_of((operand, shape)),
        combine={f"d{dim}": combine for dim in reduction_dims},
        linear=(frozenset({0}),) if is_linear else (),
        passes=frozenset({combine}),
        lower=_mean if is_mean else None,
    )


def _mean(local: LocalCall) -> fx.Node:
    """Mean of a split tensor: partial sums divided by the number of elements of the whole."""
    reduction_dims = reduced_dims(local.node)
    if not any(local.axes(f"d{dim}") for dim in reduction_dims):
        return local.default()
    count = math.prod(local.operand_shape(0)[dim] for dim in reduction_dims)
    keep = len(local.result_shape()) == len(local.operand_shape(0))
    total = local.call(aten.sum.dim_IntList, local.parts[0], sorted(reduction_dims), keep, **local.node.kwargs)
    return local.call(aten.div.Tensor, total, count)


RULES = dict.fromkeys(_COMBINE, reduction)
