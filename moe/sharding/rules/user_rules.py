"""Rules that users register, held against the tensors that their operator has."""

import math
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from moe.sharding.operands import operands, results, shape_of
from moe.sharding.rules.rule import Dims, Rule
from moe.spec import spec_error

RuleMaker = Callable[[fx.Node], Rule]


def with_checks(maker: RuleMaker) -> RuleMaker:
    """The maker of rules, with a check: it raises SpecError for a rule that does not match its node's tensors."""

    def make(node: fx.Node) -> Rule:
        rule = maker(node)
        place = node.meta.get("line") or node.name
        for wrong, remedy in _wrong(rule, node):
            raise spec_error("invalid_value", place, str(node.target), f"has an invalid rule: {wrong}", remedy)
        return rule

    return make


def _wrong(rule: Rule, node: fx.Node) -> Iterator[tuple[str, str]]:
    """(what is wrong with a rule, what to do)"""
    if not isinstance(rule, Rule):
        yield (f"it is a {type(rule).__name__}", "return a Rule from the function passed to sharding.register")
        return
    operand_shapes = [shape_of(operand) for operand in operands(node)]
    result_shapes = [None if result is None else tuple(result.shape) for result in results(node)]
    for kind, tensor_dims, shapes in (
        ("operands", rule.operands, operand_shapes),
        ("results", rule.results, result_shapes),
    ):
        if len(tensor_dims) != len(shapes):
            yield (f"it has {len(tensor_dims)} {kind}, the operator has {len(shapes)}", "describe every one")
            return
        for number, (dims, shape) in enumerate(zip(tensor_dims, shapes, strict=True)):
            if shape is not None:
                yield from _wrong_dims(f"{kind}[{number}]", dims, shape, rule)


def _wrong_dims(name: str, dims: Dims, shape: Sequence[int], rule: Rule) -> Iterator[tuple[str, str]]:
    """Problems of one tensor's dimensions; a factor without a size has 1."""
    if len(dims) != len(shape):
        remedy = "use one tuple of factors per dimension, () for an unsplit one"
        yield f"{name} has {len(dims)} dimensions for the shape {list(shape)}", remedy
        return
    for dim, (factors, size) in enumerate(zip(dims, shape, strict=True)):
        if isinstance(factors, str):
            yield (f"dimension {dim} of {name} is the string {factors!r}", f"use a tuple of factors: ({factors!r},)")
        elif factors and math.prod(rule.sizes.get(factor, 1) for factor in factors) != size:
            sizes = {factor: rule.sizes.get(factor) for factor in factors}
            remedy = 'use the size from the node: node.args[0].meta["val"].shape'
            yield f"dimension {dim} of {name} has sizes {sizes} for a size of {size}", remedy
