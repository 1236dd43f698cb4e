"""Classes of a captured graph's nodes: those of blocks that repeat are planned once, and lie alike.

Layers that are the same follow each other in the graph's order, so their operators, shapes and constants repeat with a
period. Nodes of one place in the period are one class. Any classes would give a right plan, as long as their operators
have the same options: these only have to be good ones.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, fx

from moe.sharding.capture.capture import Captured
from moe.sharding.operands import is_operator, operands

_SHORTEST = 6
"""Operators of the smallest block that is looked for."""
_WINDOW = 4
_KEYS = {"seed", "layer", "purpose"}
"""Names of the arguments of our own operators that key random numbers."""


def classes(captured: Captured, pins: Mapping[str, Hashable]) -> dict[fx.Node, fx.Node]:
    """The first node of its class, for every node. Nodes that something else is asked for are of classes of their
    own."""
    found: dict[fx.Node, fx.Node] = {}
    backward = captured.backward
    for phase in (False, True):
        nodes = [
            node
            for node in captured.graph.graph.nodes
            if node.op == "call_function" and (node in backward) == phase
        ]
        signs = [(_sign(node, backward), pins.get(node.name)) for node in nodes]
        for first, period, length in _runs(signs):
            for at in range(first, first + length):
                found[nodes[at]] = nodes[first + (at - first) % period]
    for node in captured.graph.graph.nodes:
        if is_operator(node):
            found.setdefault(node, node)
    _tie_leaves(captured, found, pins)
    for node in captured.graph.graph.nodes:
        found.setdefault(node, node)
    return found


def _tie_leaves(captured: Captured, found: dict[fx.Node, fx.Node], pins: Mapping[str, Hashable]) -> None:
    """Parameters and buffers that the same place of a block uses."""
    trained = set(captured.gradients)
    first: dict[Hashable, fx.Node] = {}
    for node in captured.graph.graph.nodes:
        for number, operand in enumerate(operands(node)) if is_operator(node) else ():
            leaf = captured.leaves.get(operand)
            if leaf is None or leaf.kind not in ("parameter", "buffer") or operand in found:
                continue
            key: Hashable = (found[node], number, leaf.kind, leaf.shape, leaf.dtype, leaf.name in trained)
            key = (key, pins.get(operand.name))
            found[operand] = first.setdefault(key, operand)


def _sign(node: fx.Node, backward: Container[fx.Node]) -> Hashable:
    """What is the same of nodes that have the same options."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            made = value.meta.get("val")
            kind = "leaf" if value.op != "call_function" else value in backward
            return ("node", kind, (tuple(made.shape), made.dtype) if isinstance(made, Tensor) else None)
        if isinstance(value, list | tuple):
            return tuple(plain(each) for each in value)
        return str(value)

    made = node.meta.get("val")
    every = made if isinstance(made, list | tuple) else (made,)
    shapes = tuple((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else None for each in every)
    return node.target, plain(_without_keys(node)), plain(list(node.kwargs.items())), shapes


def _without_keys(node: fx.Node) -> list[Any]:
    """Arguments, but for those that only say which random numbers are drawn: they differ from layer to layer."""
    schema = getattr(node.target, "_schema", None)
    names = [each.name for each in schema.arguments] if schema is not None else []
    return [value for value, name in zip_longest(node.args, names[: len(node.args)]) if name not in _KEYS]


def _runs(signs: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """(first, period, length) of stretches in which signs repeat with a period, at least twice; none overlap, the
    longest are taken first."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for at in range(len(signs) - _WINDOW + 1):
        places[tuple(signs[at : at + _WINDOW])].append(at)
    distances: Counter[int] = Counter()
    for every in places.values():
        distances.update(later - before for before, later in itertools.pairwise(every))
    candidates = []
    for period, _ in distances.most_common(32):
        if period < _SHORTEST:
            continue
        at = 0
        while at + period < len(signs):
            length = 0
            while at + period + length < len(signs) and signs[at + length] == signs[at + period + length]:
                length += 1
            if length >= period:
                candidates.append((length + period, period, at))
            at += length + 1
    found: list[tuple[int, int, int]] = []
    taken = [False] * len(signs)
    for length, period, first in sorted(candidates, key=lambda each: (-each[0], each[1], each[2])):
        begin, end = first, first + length
        while begin < end and taken[begin]:
            begin += 1
        while end > begin and taken[end - 1]:
            end -= 1
        if end - begin >= 2 * period and not any(taken[begin:end]):
            taken[begin:end] = [True] * (end - begin)
            found.append((begin, period, end - begin))
    return found
