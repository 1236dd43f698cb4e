"""Work that hints split stays split: where propagation from hints splits an operator along a mesh axis, no plan repeats
it whole on every rank of that axis. Where hints place inputs and all parameters along an axis without contradiction,
products are split exactly as propagation splits them, as in data parallelism. Where both operands of a product are
split so that one has to be gathered or passed round a ring, as in FSDP, cost decides which and when."""

from collections.abc import Callable, Mapping

from torch import fx

from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.hints import Pin
from moe.sharding.operands import is_operator
from moe.sharding.propagation.propagate import PropagationResult
from moe.sharding.rules.rule import Rule

Bound = Mapping[fx.Node, tuple[str, ...]]
"""By operator, what hints require along each axis: the name of an option, SPLIT or ANY."""

ANY, SPLIT = "any", "split"


def bound_by(
    capture: CapturedGraph,
    propagation: PropagationResult,
    rule_of: Callable[[fx.Node], Rule],
    pins: Mapping[str, Pin],
    *,
    in_loop: bool,
) -> Bound:
    """Requirements on operators, apart from views, that follow from hints (`pins`); `in_loop` adds the axis of the loop
    over micro-batches before the mesh's."""
    parameters = [node.name for node, leaf in capture.leaves.items() if leaf.kind == "parameter" and leaf.shape]
    num_axes = len(propagation.assignment.degrees)
    open_axes = {conflict.axis for conflict in propagation.conflicts} | _axes_of_rings(capture, propagation, rule_of)
    full = [
        axis not in open_axes and all(name in pins and pins[name][axis] is not None for name in parameters)
        for axis in range(num_axes)
    ]
    requirements: dict[fx.Node, tuple[str, ...]] = {}
    for node in capture.graph.graph.nodes:
        if not is_operator(node) or rule_of(node).work == "none":
            continue
        names = [option.name for option in propagation.assignment.options[node.name]]
        along_axes = [
            ANY if name == "whole" else name if full[axis] and rule_of(node).is_product else SPLIT
            for axis, name in enumerate(names)
        ]
        requirements[node] = (*([ANY] * in_loop), *along_axes)
    return requirements


def _axes_of_rings(
    capture: CapturedGraph, propagation: PropagationResult, rule_of: Callable[[fx.Node], Rule]
) -> set[int]:
    """Axes along which propagation makes a product pass one operand round a ring."""
    return {
        axis
        for node in capture.graph.graph.nodes
        if is_operator(node) and rule_of(node).is_product
        for axis, option in enumerate(propagation.assignment.options[node.name])
        if option.exchange is not None and option.exchange.kind == "ring"
    }


def allows(bound: Bound, node: fx.Node, names: tuple[str, ...]) -> bool:
    """Whether an operator may have these options."""
    return all(
        requirement == ANY or (name != "whole" if requirement == SPLIT else name == requirement)
        for requirement, name in zip(bound.get(node, ()), names, strict=False)
    )
