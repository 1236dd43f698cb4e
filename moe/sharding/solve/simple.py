"""Layouts that people write by hand, which are priced next to the search's result: data parallelism as in DDP, where
every rank has all parameters and a part of the batch, and as in FSDP, where parameters are sharded between uses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.hints import Pin
from moe.sharding.operands import shape_of
from moe.sharding.placement import WHOLE, AxisPlacement, Placements, split
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.propagation.propagate import Propagation
from moe.sharding.rules.rule import Rule
from moe.sharding.solve.solution import has_no_empty_part

LayoutName = Literal["data parallel", "fully sharded", "searched", "from hints"]
"""`searched` is the result of the search; `from hints` is the propagation of hints alone."""


def simple_layouts(
    capture: CapturedGraph, rule_of: Callable[[fx.Node], Rule], degrees: Sequence[int]
) -> Iterator[tuple[LayoutName, Assignment]]:
    """Both layouts along all axes of a mesh; none if no input has a batch dimension."""
    batch = _batch(capture)
    if not batch:
        return
    shapes = {node: leaf.shape for node, leaf in capture.leaves.items() if leaf.kind in ("parameter", "buffer")}
    pins: dict[str, Pin] = {node.name: (WHOLE,) * len(degrees) for node in shapes}
    pins |= {node.name: _repeat(degrees, split(0)) for node in batch}
    data_parallel = Propagation(capture, rule_of, degrees, pins, {}).run().assignment
    yield "data parallel", data_parallel
    parameter_placements = {
        node.name: _shard_first_dim(shape, degrees)
        for node, shape in shapes.items()
        if capture.leaves[node].kind == "parameter"
    }
    yield "fully sharded", replace(data_parallel, leaves={**data_parallel.leaves, **parameter_placements})


def _batch(capture: CapturedGraph) -> list[fx.Node]:
    """Inputs with the batch in dimension 0: those as long there as the first input."""
    inputs = [node for node, leaf in capture.leaves.items() if leaf.kind == "input" and leaf.shape]
    return [node for node in inputs if shape_of(node)[0] == shape_of(inputs[0])[0]]


def _shard_first_dim(shape: tuple[int, ...], degrees: Sequence[int]) -> Placements:
    """Split, along all axes, of the first dimension that has a row for each rank; whole if there is none."""
    ways = (_repeat(degrees, split(dim)) for dim in range(len(shape)))
    return next((way for way in ways if has_no_empty_part(shape, way, degrees)), (WHOLE,) * len(degrees))


def _repeat(degrees: Sequence[int], placement: AxisPlacement) -> Placements:
    """The same placement along all axes that have several ranks."""
    return tuple(placement if degree > 1 else WHOLE for degree in degrees)
