"""List of the collectives of a program."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.capture.simplify import FREE
from moe.sharding.hints.annotate import PLACED
from moe.sharding.operands import operands
from moe.sharding.partition.program import Program
from moe.sharding.partition.writer import moved_bytes
from moe.sharding.plan_records import Collective

_LOCAL = ("slice", "keep_first")


def collectives_of(
    program: Program, axes: Sequence[str], degrees: Sequence[int], capture: CapturedGraph
) -> tuple[Collective, ...]:
    """Collectives in the order in which they are called, without those that move no bytes."""
    collectives = []
    labels = _user_names(capture)
    for phase, module in (("forward", program.forward), ("backward", program.backward)):
        for node in module.graph.nodes if module is not None else ():
            for collective in _node_collectives(node, phase, axes, degrees):
                name, block = labels.get(collective.tensor, (collective.tensor, None))
                collectives.append(
                    replace(collective, tensor=name, block=node.meta.get("block") if block is None else block)
                )
    return tuple(collective for collective in collectives if collective.num_bytes)


def _user_names(capture: CapturedGraph) -> dict[str, tuple[str, str | None]]:
    """(name, path of the module) of inputs, parameters, buffers and gradients, by node."""
    labels: dict[str, tuple[str, str | None]] = {}
    for node, leaf in capture.leaves.items():
        labels[node.name] = leaf.name, _owner(leaf.name) if leaf.kind in ("parameter", "buffer") else None
    for name, node in capture.gradients.items():
        for tensor in _looked_at(node):
            labels.setdefault(tensor.name, (f"gradient of {name}", _owner(name)))
    return labels


def _looked_at(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and the tensors that it is a view of."""
    yield node
    while node.target in FREE or node.target is PLACED:
        (node,) = operands(node)
        yield node


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _node_collectives(node: fx.Node, phase: str, axes: Sequence[str], degrees: Sequence[int]) -> list[Collective]:
    if "move" in node.meta:
        move, _, _, tensor, _, _ = node.meta["move"]
        if move.kind in _LOCAL or node.meta.get("times") == 0:  # the end of a loop
            return []
        num_bytes = moved_bytes(node, degrees)
        collective = Collective(move.kind, axes[move.axis], num_bytes, tensor, phase, node.meta.get("line"))
        return [collective] * node.meta.get("times", 1)
    if "exchange" in node.meta:
        kind, axis, num_bytes, tensor = node.meta["exchange"]
        collective = Collective(kind, axes[axis], int(num_bytes), tensor, phase, node.meta.get("line"))
        return [collective] * node.meta.get("times", 1)
    return []
