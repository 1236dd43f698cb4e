"""Tensor operands and results of a captured node."""

from collections.abc import Callable
from operator import getitem
from typing import Any

from torch import Tensor, fx


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensors among a node's arguments, in order; a tensor that is there twice is listed twice."""
    tensors: list[fx.Node] = []
    replace_operands(node, lambda number, operand: tensors.append(operand))
    return tensors


def replace_operands(
    node: fx.Node, replacement: Callable[[int, fx.Node], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keyword arguments with each tensor operand replaced by what a function of (number, node)
    returns."""
    number = 0

    def walk(value: Any) -> Any:
        nonlocal number
        if is_tensor(value):
            number += 1
            return replacement(number - 1, value)
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), int):
            return value.meta["val"]  # a size that an operator returns
        if isinstance(value, list | tuple):
            return type(value)(walk(element) for element in value)
        return value

    args = tuple(walk(argument) for argument in node.args)
    return args, {key: walk(argument) for key, argument in node.kwargs.items()}


def results(node: fx.Node) -> list[Any]:
    """Fake values of an operator's results; None for a result that is not a tensor."""
    value = node.meta.get("val")
    return (
        [tensor if isinstance(tensor, Tensor) else None for tensor in value]
        if isinstance(value, list | tuple)
        else [value]
    )


RECOMPUTED = "recomputed"
"""Key in the meta of a recomputed node: (block, name of the node in the forward pass)."""


def source(value: fx.Node) -> tuple[fx.Node, int]:
    """(operator that computes a tensor, number of the result)."""
    if value.op == "call_function" and value.target is getitem:
        return value.args[0], value.args[1]  # type: ignore[return-value]
    return value, 0


def result_nodes(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Results of an operator that are used, each with its number."""
    if not isinstance(node.meta.get("val"), list | tuple):
        return [(node, 0)]
    return [(user, source(user)[1]) for user in node.users]


def is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not getitem


def shape_of(value: fx.Node) -> tuple[int, ...]:
    return tuple(value.meta["val"].shape)


def argument(node: fx.Node, number: int, name: str, default: Any = None) -> Any:
    """An argument by its position or its name."""
    return node.args[number] if number < len(node.args) else node.kwargs.get(name, default)
