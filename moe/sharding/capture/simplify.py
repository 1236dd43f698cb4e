"""Simplifications of a captured graph that do not change what it computes: fewer nodes to plan, and no duplicates."""

from collections.abc import Container
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_IDENTITIES = {
    aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
    aten.resolve_conj.default, aten.resolve_neg.default,
}  # fmt: skip
_COMPUTED = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Operators that compute conjugation and negation, by those that only set a flag of the tensor: exchanges move memory
without flags."""
FREE = {aten.view.default, aten.permute.default, aten.expand.default}
"""Views. The backward pass creates them again instead of saving them."""
_RANDOM = {
    aten.native_dropout.default, aten.bernoulli.p, aten.bernoulli.default, aten.rand.default, aten.rand_like.default,
    aten.randn.default, aten.randn_like.default, aten.randint.low, aten.randint.default, aten.randperm.default,
    aten.multinomial.default, aten.normal.Tensor_Tensor, aten.empty.memory_format, aten.exponential.default,
    aten.uniform.default, aten.normal_functional.default, aten.randint_like.default,
}  # fmt: skip
_CREATION: dict[Any, Any] = {
    aten.zeros_like.default: aten.zeros.default,
    aten.zero.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.empty_like.default: aten.empty.memory_format,
    aten.fill.Scalar: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
    aten.rand_like.default: aten.rand.default,
}
"""Operators that create a tensor like another one without reading its values, with those that take a shape."""
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
"""Operators that give the same elements another shape; parts are copied if that is necessary."""
CHECKS = {
    aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default, aten._linalg_check_errors.default,
}  # fmt: skip
"""Operators that only check values."""


def simplify(graph: fx.Graph, backward: Container[fx.Node]) -> None:
    """Simplify in place. Removed are aliases, views of views, transpositions of transpositions, operators that repeat
    another one of the same pass, and unused operators. Tensors created like another one are created from a shape.

    An operator that both passes compute remains in both: its result would otherwise be saved by the forward pass. For
    the same reason, views that the backward pass uses are created again there.
    """
    nodes_by_key: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in CHECKS:  # checks of the user's values, such as a class within its range
            graph.erase_node(node)
            continue
        if node.target in _CREATION:
            _as_creation(node)
        node.target = _COMPUTED.get(node.target, node.target)
        if (equivalent := _identity_input(node)) is not None:
            _replace(node, equivalent)
            continue
        if node.target in _RANDOM or getattr(node.target, "namespace", "") != "aten":
            continue
        phase = None if node.target in FREE else node in backward
        key = (node.target, _freeze(node.args), _freeze(node.kwargs), phase)
        if key in nodes_by_key:
            _replace(node, nodes_by_key[key])
        else:
            nodes_by_key[key] = node
    graph.eliminate_dead_code()
    _recompute_views(graph, backward)


def _identity_input(node: fx.Node) -> fx.Node | None:
    """The input that a node returns unchanged, if any; also rewrites the node in its simplest form."""
    if node.target in _IDENTITIES:
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.clone.default and not any(user.op == "output" for user in node.users):
        return node.args[0]  # type: ignore[return-value]
    if _changes_nothing(node):
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.copy.default and _alike(node, node.args[1]):
        return node.args[1]  # type: ignore[return-value]
    if node.target is aten.transpose.int:
        _as_permutation(node)
    if node.target is aten.permute.default:
        source: Any = node.args[0]
        dims: list[int] = [dim % max(1, len(_shape(node))) for dim in node.args[1]]  # type: ignore[union-attr, operator, misc]
        if source.op == "call_function" and source.target is aten.permute.default:
            inner = [dim % len(dims) for dim in source.args[1]]
            source, dims = source.args[0], [inner[dim] for dim in dims]
        node.args = (source, dims)
        if dims == sorted(dims):
            return source
        long = [dim for dim in dims if _shape(source)[dim] > 1]
        if long == sorted(long):
            node.target, node.args = aten.view.default, (source, list(_shape(node)))
    if node.target in _VIEWS or (node.target is aten.as_strided.default and _is_view(node)):
        source = node.args[0]
        while source.op == "call_function" and source.target in _VIEWS:
            source = source.args[0]
        node.target, node.args, node.kwargs = aten.view.default, (source, list(_shape(node))), {}
        if _shape(source) == _shape(node):
            return source
    return None


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a node is a slice of all elements, an expansion to the same shape, or padding by nothing."""
    if node.target is aten.constant_pad_nd.default:
        return not any(node.args[1])  # type: ignore[arg-type]
    if node.target not in (aten.slice.Tensor, aten.expand.default):
        return False
    steps = node.args[4:] if node.target is aten.slice.Tensor else ()
    return _shape(node) == _shape(node.args[0]) and all(step == 1 for step in steps)


def _alike(node: fx.Node, candidate: Any) -> bool:
    value, candidate_value = node.meta["val"], candidate.meta["val"]
    return value.shape == candidate_value.shape and value.dtype == candidate_value.dtype


def _recompute_views(graph: fx.Graph, backward: Container[fx.Node]) -> None:
    nodes = list(graph.nodes)
    positions = {node: position for position, node in enumerate(nodes)}
    backward_nodes = {node for node in nodes if node in backward}
    for node in reversed(nodes):
        if node.op != "call_function" or node.target not in FREE or node in backward_nodes:
            continue
        users = sorted((user for user in node.users if user in backward_nodes), key=positions.__getitem__)
        if not users:
            continue
        with graph.inserting_before(users[0]):
            copy = graph.node_copy(node)
        backward_nodes.add(copy)
        positions[copy] = positions[users[0]]  # just before it
        for user in users:
            user.replace_input_with(node, copy)
    graph.eliminate_dead_code()


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _freeze(element)) for key, element in value.items())
    if isinstance(value, list | tuple):
        return tuple(_freeze(element) for element in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value  # -0.0 equals 0.0


def _is_view(node: fx.Node) -> bool:
    """Whether the result of `as_strided` has the operand's elements in the same order."""
    arguments: Any = node.args
    source, shape, strides, *first = arguments
    source_value, in_order = source.meta["val"], torch.empty(shape, device="meta")
    return bool(
        source_value.is_contiguous()
        and source_value.numel() == in_order.numel()
        and list(in_order.stride()) == list(strides)
        and not any(first)
    )


def _as_creation(node: fx.Node) -> None:
    value = node.args[1:] if _CREATION[node.target] is aten.full.default else ()
    result = node.meta["val"]
    node.target, node.args = _CREATION[node.target], (list(result.shape), *value)
    node.kwargs = {"dtype": result.dtype, "device": result.device}


def _as_permutation(node: fx.Node) -> None:
    source, first, second = node.args
    dims = list(range(len(_shape(node))))
    if dims:
        dims[first], dims[second] = dims[second], dims[first]  # type: ignore[index]
    node.target, node.args = aten.permute.default, (source, dims)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _replace(node: fx.Node, replacement: Any) -> None:
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
