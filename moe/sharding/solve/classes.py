"""Classes of a captured graph's nodes. Repeated blocks are planned once: all nodes of a class have the same placements.

Identical layers follow each other in the graph's order, so their operators, shapes and constants repeat with a period.
Nodes at the same place of the period are one class. Any classes give a correct plan, as long as the operators of a
class have the same options; how good the plan is depends on them.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.operands import is_operator, operands

_SHORTEST = 6
"""Smallest period that is looked for, in operators."""
_WINDOW = 4
_KEYS = {"seed", "layer", "purpose"}
"""Arguments of this package's operators that are keys of random numbers."""


def classes(capture: CapturedGraph, pins: Mapping[str, Hashable]) -> dict[fx.Node, fx.Node]:
    """The first node of the class of each node. Nodes with different pins are in different classes."""
    class_of: dict[fx.Node, fx.Node] = {}
    backward = capture.backward
    for phase in (False, True):
        nodes = [
            node for node in capture.graph.graph.nodes if node.op == "call_function" and (node in backward) == phase
        ]
        signs = [(_sign(node, backward), pins.get(node.name)) for node in nodes]
        for first, period, length in _runs(signs):
            for index in range(first, first + length):
                class_of[nodes[index]] = nodes[first + (index - first) % period]
    for node in capture.graph.graph.nodes:
        if is_operator(node):
            class_of.setdefault(node, node)
    _tie_leaves(capture, class_of, pins)
    for node in capture.graph.graph.nodes:
        class_of.setdefault(node, node)
    return class_of


def _tie_leaves(capture: CapturedGraph, class_of: dict[fx.Node, fx.Node], pins: Mapping[str, Hashable]) -> None:
    """Put parameters and buffers that nodes of one class use at the same place in one class."""
    gradient_names = set(capture.gradients)
    first: dict[Hashable, fx.Node] = {}
    for node in capture.graph.graph.nodes:
        for number, operand in enumerate(operands(node)) if is_operator(node) else ():
            leaf = capture.leaves.get(operand)
            if leaf is None or leaf.kind not in ("parameter", "buffer") or operand in class_of:
                continue
            key: Hashable = (class_of[node], number, leaf.kind, leaf.shape, leaf.dtype, leaf.name in gradient_names)
            key = (key, pins.get(operand.name))
            class_of[operand] = first.setdefault(key, operand)


def _sign(node: fx.Node, backward: Container[fx.Node]) -> Hashable:
    """Key that is equal for nodes with the same options."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            tensor = value.meta.get("val")
            kind = "leaf" if value.op != "call_function" else value in backward
            return ("node", kind, (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else None)
        if isinstance(value, list | tuple):
            return tuple(plain(element) for element in value)
        return str(value)

    output = node.meta.get("val")
    tensors = output if isinstance(output, list | tuple) else (output,)
    shapes = tuple((tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else None for tensor in tensors)
    return node.target, plain(_without_keys(node)), plain(list(node.kwargs.items())), shapes


def _without_keys(node: fx.Node) -> list[Any]:
    """Arguments without keys of random numbers, which differ from layer to layer."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return [value for value, name in zip_longest(node.args, names[: len(node.args)]) if name not in _KEYS]


def _runs(signs: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """(first, period, length) of stretches in which the signs repeat at least once with the period. They do not
    overlap; the longest are taken first."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index in range(len(signs) - _WINDOW + 1):
        places[tuple(signs[index : index + _WINDOW])].append(index)
    distances: Counter[int] = Counter()
    for positions in places.values():
        distances.update(end - begin for begin, end in itertools.pairwise(positions))
    candidates = []
    for period, _ in distances.most_common(32):
        if period < _SHORTEST:
            continue
        index = 0
        while index + period < len(signs):
            length = 0
            while index + period + length < len(signs) and signs[index + length] == signs[index + period + length]:
                length += 1
            if length >= period:
                candidates.append((length + period, period, index))
            index += length + 1
    runs: list[tuple[int, int, int]] = []
    is_covered = [False] * len(signs)
    for length, period, first in sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1], candidate[2])):
        begin, end = first, first + length
        while begin < end and is_covered[begin]:
            begin += 1
        while end > begin and is_covered[end - 1]:
            end -= 1
        if end - begin >= 2 * period and not any(is_covered[begin:end]):
            is_covered[begin:end] = [True] * (end - begin)
            runs.append((begin, period, end - begin))
    return runs
