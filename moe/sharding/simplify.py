"""Simplifications of a captured graph that leave what it computes as it is: fewer nodes to plan, and none twice."""

from collections.abc import Container
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_FREE = {aten.view.default, aten.permute.default, aten.expand.default}
_RANDOM = {
    aten.native_dropout.default, aten.bernoulli.p, aten.bernoulli.default, aten.rand.default, aten.rand_like.default,
    aten.randn.default, aten.randn_like.default, aten.randint.low, aten.randint.default, aten.randperm.default,
    aten.multinomial.default, aten.normal.Tensor_Tensor, aten.empty.memory_format, aten.exponential.default,
    aten.uniform.default, aten.normal_functional.default, aten.randint_like.default,
}  # fmt: skip
_LIKE = {
    aten.zeros_like.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.empty_like.default: aten.empty.memory_format,
    aten.new_empty.default: aten.empty.memory_format,
    aten.rand_like.default: aten.rand.default,
}
"""Operators that make a tensor like another one, whose values do not matter."""
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def simplify(graph: fx.Graph, backward: Container[fx.Node]) -> None:
    """In place: copies of names, views of views, transpositions of transpositions go, and what is computed twice in the
    forward pass or in the backward pass, and what nothing uses. What is made like another tensor is made of nothing.

    What both passes compute stays in both: otherwise it would be kept from one to the other.
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _SAME:
            _replace(node, node.args[0])
            continue
        if node.target in _LIKE:
            _as_creation(node)
        elif node.target in _VIEWS:
            source = node.args[0]
            while source.op == "call_function" and source.target in _VIEWS:
                source = source.args[0]
            node.target, node.args = aten.view.default, (source, list(_shape(node)))
            if _shape(source) == _shape(node):
                _replace(node, source)
                continue
        elif node.target is aten.transpose.int:
            _as_permutation(node)
        if node.target is aten.permute.default:
            source, dims = node.args
            dims = [dim % len(dims) for dim in dims]
            if source.op == "call_function" and source.target is aten.permute.default:
                inner = [dim % len(dims) for dim in source.args[1]]
                source, dims = source.args[0], [inner[dim] for dim in dims]
            node.args = (source, dims)
            if dims == sorted(dims):
                _replace(node, source)
                continue
        if node.target in _RANDOM or getattr(node.target, "namespace", "") != "aten":
            continue
        phase = None if node.target in _FREE else node in backward
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), phase)
        if key in seen:
            _replace(node, seen[key])
        else:
            seen[key] = node
    graph.eliminate_dead_code()


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    return type(value), value


def _as_creation(node: fx.Node) -> None:
    value = node.args[1:] if node.target is aten.full_like.default else ()
    made = node.meta["val"]
    node.target, node.args = _LIKE[node.target], (list(made.shape), *value)
    node.kwargs = {"dtype": made.dtype, "device": made.device}


def _as_permutation(node: fx.Node) -> None:
    source, first, second = node.args
    dims = list(range(len(_shape(node))))
    if dims:
        dims[first], dims[second] = dims[second], dims[first]  # type: ignore[index]
    node.target, node.args = aten.permute.default, (source, dims)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _replace(node: fx.Node, other: Any) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
