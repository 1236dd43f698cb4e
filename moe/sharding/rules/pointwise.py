"""Pointwise operators: each dimension of the result is a dimension of the operands that are not broadcast along it."""

from typing import Any

import torch
from torch import fx

from moe.sharding import torch_private
from moe.sharding.operands import operands, results, shape_of
from moe.sharding.placement import COMBINES
from moe.sharding.rules.dims import broadcast, factor_dims, sizes_of
from moe.sharding.rules.rule import Rule

aten = torch.ops.aten

_ADDITIVE = (frozenset({0, 1}), frozenset({0}), frozenset({1}))
_GRADIENTS = {
    aten.elu_backward.default, aten.gelu_backward.default, aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default, aten.mish_backward.default,
    aten.native_dropout_backward.default, aten._prelu_kernel_backward.default, aten.sigmoid_backward.default,
    aten.silu_backward.default, aten.softplus_backward.default, aten.softshrink_backward.default,
    aten.tanh_backward.default, aten.threshold_backward.default,
}  # fmt: skip
"""Operators that are linear in their first operand. Torch does not tag all of them as pointwise."""

_LINEAR: dict[Any, tuple[frozenset[int], ...]] = {
    **dict.fromkeys(_GRADIENTS, (frozenset({0}),)),
    aten.add.Tensor: _ADDITIVE,
    aten.sub.Tensor: _ADDITIVE,
    aten.neg.default: (frozenset({0}),),
    aten.mul.Tensor: (frozenset({0}), frozenset({1})),
    aten.div.Tensor: (frozenset({0}),),
    aten.mul.Scalar: (frozenset({0}),),
    aten.div.Scalar: (frozenset({0}),),
    aten.clone.default: (frozenset({0}),),
    aten._to_copy.default: (frozenset({0}),),
    aten.where.self: (frozenset({1, 2}), frozenset({1}), frozenset({2})),
}
"""Sets of operands in which an operator is linear."""

_ADDED: dict[Any, frozenset[int]] = {
    aten.add.Tensor: frozenset({0, 1}),
    aten.sub.Tensor: frozenset({0, 1}),
    aten.where.self: frozenset({1, 2}),
}

_DIVIDED = {
    aten.div.Tensor_mode, aten.fmod.Tensor, aten.remainder.Tensor, aten.remainder.Scalar_Tensor,
}  # fmt: skip
"""Divisions of integers, which raise for a divisor of 0, such as padding."""

UNTAGGED = {
    aten.copy.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.bitwise_not.default,
    aten._prelu_kernel.default,
    *_GRADIENTS,
}
"""Pointwise operators that torch does not tag as such."""


def is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch_private.OpOverload) and (
        torch.Tag.pointwise in node.target.tags or node.target in UNTAGGED
    )


def pointwise(node: fx.Node) -> Rule:
    """Rule of a pointwise operator, which broadcasts its operands."""
    (shape,) = {tuple(result.shape) for result in results(node) if result is not None}
    dims, inputs = factor_dims(shape), operands(node)
    linear = _LINEAR.get(node.target, ())
    if node.target is aten._to_copy.default and not _is_exact(node):
        linear = ()
    linear = tuple(operand_numbers for operand_numbers in linear if max(operand_numbers) < len(inputs))
    if node.target in _ADDED and len(inputs) < (3 if node.target is aten.where.self else 2):
        linear = ()
    divisors = frozenset(
        {len(inputs) - 1} if node.target in _DIVIDED and not inputs[-1].meta["val"].is_floating_point() else ()
    )
    return Rule(
        operands=tuple(broadcast(dims, shape, shape_of(operand)) for operand in inputs),
        results=tuple(() if result is None else dims for result in results(node)),
        sizes=sizes_of((dims, shape)),
        linear=linear,
        indices=divisors,
        identity=dict.fromkeys(divisors, 1),
        added=_ADDED.get(node.target, frozenset()),
        passes=COMBINES if node.target is aten.clone.default else frozenset({"sum"}),
    )


def _is_exact(node: fx.Node) -> bool:
    """Whether a conversion of dtype keeps every value, so that it commutes with a sum."""
    before, after = operands(node)[0].meta["val"].dtype, node.meta["val"].dtype
    return before == after or (before.is_floating_point and torch.promote_types(before, after) == after)
