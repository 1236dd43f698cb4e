"""The collectives of a program, read off it."""

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from moe.sharding.partition.program import Program
from moe.sharding.placement import Placements, part_shape
from moe.sharding.sharding_plan import Collective

_LOCAL = ("slice", "keep_first")


def collectives_of(program: Program, axes: Sequence[str], degrees: Sequence[int]) -> tuple[Collective, ...]:
    """In the order in which they are made."""
    found = []
    for phase, module in (("forward", program.forward), ("backward", program.backward)):
        for node in module.graph.nodes if module is not None else ():
            found += _of_node(node, phase, axes, degrees)
    return tuple(found)


def _of_node(node: fx.Node, phase: str, axes: Sequence[str], degrees: Sequence[int]) -> list[Collective]:
    if "move" in node.meta:
        move, shape, itemsize, tensor, before, after = node.meta["move"]
        if move.kind in _LOCAL:
            return []
        larger = after if move.kind == "gather" else before
        num_bytes = _bytes(shape, itemsize, larger, degrees)
        return [Collective(move.kind, axes[move.axis], num_bytes, tensor, phase, node.meta.get("where"))]
    if "exchange" in node.meta:
        kind, axis, num_bytes, tensor = node.meta["exchange"]
        return [Collective(kind, axes[axis], int(num_bytes), tensor, phase, node.meta.get("where"))]
    return []


def _bytes(shape: Any, itemsize: int, placements: Placements, degrees: Sequence[int]) -> int:
    return itemsize * math.prod(part_shape(shape, placements, degrees))
