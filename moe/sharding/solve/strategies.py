"""Choice of a module's layout and of how its step runs: the fastest one considered, or a layout that people write by
hand if the fastest gains no more than the error of predictions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe.plan.cluster.cluster import Cluster
from moe.plan.search.spread import WITHIN_ERROR
from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.plan_records import PricedLayout
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.propagation.propagate import Propagation, PropagationResult
from moe.sharding.rules.registry import Rules
from moe.sharding.solve.accumulate import Loop, classes_of, in_loop, loop_of, pins_in_loop
from moe.sharding.solve.bound import Bound, bound_by
from moe.sharding.solve.captured_request import CapturedRequest
from moe.sharding.solve.classes import classes
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.recompute import recompute_blocks, with_recomputed_pins
from moe.sharding.solve.search import PlacementSearch
from moe.sharding.solve.simple import LayoutName, simple_layouts
from moe.sharding.solve.solution import ShardingSolution
from moe.spec import SpecError, spec_error


@dataclass(frozen=True, eq=False)
class Strategy:
    """A candidate plan: a solution on one mesh, with one number of micro-batches, with or without recomputation."""

    layout: LayoutName
    solution: ShardingSolution
    degrees: dict[str, int]
    costs: Costs
    rules: Rules
    propagation: PropagationResult | None
    count: int
    recompute: bool
    devices: tuple[int, ...]
    """Device at each place of the mesh."""


BY_SIMPLICITY: tuple[LayoutName, ...] = ("data parallel", "fully sharded", "searched", "from hints")


def best_strategy(subject: CapturedRequest) -> tuple[Strategy | None, list[PricedLayout]]:
    """(chosen strategy, all candidates). All meshes are tried, with the smallest number of micro-batches with which any
    of them fits in memory. The captured graph may be changed, so a subject can be searched only once."""
    candidates: list[PricedLayout] = []
    meshes = _meshes(subject)
    for recompute, (count, loop) in _runs(subject):
        strategies: list[Strategy] = []
        for degrees in meshes:
            subject.request.progress.set_stage(_in_words(degrees, count, recompute, strategies))
            mesh_strategies = list(_on_mesh(subject, degrees, loop, count=count, recompute=recompute))
            candidates += [_priced_layout(subject, strategy) for strategy in mesh_strategies]
            if not mesh_strategies:
                candidates.append(PricedLayout(degrees, None, None, count, recompute))
            strategies += mesh_strategies
        if strategies:
            return choose_strategy(strategies), candidates
    return None, candidates


def choose_strategy(strategies: Sequence[Strategy]) -> Strategy:
    """The simplest layout that is slower than the fastest by no more than the error of predictions; with several meshes
    of that layout, the fastest of them."""
    limit_s = WITHIN_ERROR * min(strategy.solution.seconds for strategy in strategies)
    close_strategies = [strategy for strategy in strategies if strategy.solution.seconds <= limit_s]
    return min(close_strategies, key=lambda strategy: (BY_SIMPLICITY.index(strategy.layout), strategy.solution.seconds))


def _priced_layout(subject: CapturedRequest, strategy: Strategy) -> PricedLayout:
    memory_bytes = int(strategy.solution.memory_bytes) + subject.capture.input_bytes
    return PricedLayout(
        strategy.degrees, strategy.solution.seconds, memory_bytes, strategy.count, strategy.recompute, strategy.layout
    )


def _in_words(degrees: Mapping[str, int], count: int, recompute: bool, strategies: Sequence[Strategy]) -> str:
    parts = [f"mesh {dict(degrees)}", f"{count} micro-batch{'es' * (count > 1)}"]
    if recompute:
        parts.append("blocks computed again")
    if strategies:
        parts.append(f"best step so far {1e3 * min(strategy.solution.seconds for strategy in strategies):.3g} ms")
    return ", ".join(parts)


def has_room(subject: CapturedRequest) -> bool:
    """Whether any strategy fits in memory. The captured graph may be changed."""
    if least_bytes(subject) > subject.limits.memory_bytes * subject.request.cluster.num_devices:
        return False
    return any(
        any(_on_mesh(subject, degrees, loop, count=count, recompute=recompute, first=True))
        for recompute, (count, loop) in _runs(subject)
        for degrees in _meshes(subject)
    )


def _meshes(subject: CapturedRequest) -> list[dict[str, int]]:
    mesh, arrays = subject.request.mesh, subject.annotated_graph.mesh_of_arrays()
    if mesh is None and arrays is not None and math.prod(arrays.values()) == subject.request.cluster.num_devices:
        mesh = arrays
    return list(meshes(subject.request.cluster, mesh, subject.annotated_graph.axes))


def _runs(subject: CapturedRequest) -> Iterator[tuple[bool, tuple[int, Loop | None]]]:
    request = subject.request
    return runs(subject.capture, Rules(request.replicate), request.micro_batches, request.recompute)


def least_bytes(subject: CapturedRequest) -> float:
    """Lower bound of the bytes on all devices together: each parameter once, with its gradient and optimizer state."""
    capture, trained_factor = subject.capture, 2 + subject.limits.optimizer_slots
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize * (trained_factor if leaf.name in capture.gradients else 1)
        for leaf in capture.leaves.values()
        if leaf.kind == "parameter"
    )


def _on_mesh(
    subject: CapturedRequest,
    degrees: dict[str, int],
    loop: Loop | None,
    *,
    count: int,
    recompute: bool,
    first: bool = False,
) -> Iterator[Strategy]:
    """Strategies that fit in memory on one mesh: the search's fastest or, with `first`, its first result; then, without
    hints, the layouts that people write by hand."""
    request, capture, annotations = subject.request, subject.capture, subject.annotated_graph
    devices = annotations.devices(degrees, subject.ignored_hints)
    pins = with_recomputed_pins(capture, annotations.pins(degrees, subject.ignored_hints))
    rules = Rules(request.replicate, capture.parts, degrees)
    propagation = None
    if annotations.requested_placements or not request.search:
        hint_texts = {
            requested_placement.node.name: requested_placement.origin
            for requested_placement in annotations.requested_placements
        }
        propagation = Propagation(capture, rules, tuple(degrees.values()), pins, hint_texts).run()
    begin = [] if propagation is None else [propagation.assignment]
    requirements: Bound = {}
    if propagation is not None and request.search:
        requirements = bound_by(capture, propagation, rules, pins, in_loop=loop is not None)
    simple: list[tuple[LayoutName, Assignment]] = []
    if request.search and not annotations.requested_placements:  # else hints decide
        simple += simple_layouts(capture, rules, tuple(degrees.values()))
    alike: Mapping[str, Any] = pins
    if loop is not None:
        pins = pins_in_loop(pins)
        begin, alike = [in_loop(assignment, loop, count) for assignment in begin], classes_of(loop, pins)
        simple = [(layout, in_loop(assignment, loop, count)) for layout, assignment in simple]
    costs = Costs(request.cluster, (*([] if loop is None else [count]), *degrees.values()), loop)
    inner = PlacementSearch(
        capture, costs, rules, subject.limits, pins, classes(capture, alike) if request.search else None, requirements
    )

    def strategy(layout: LayoutName, solution: ShardingSolution) -> Strategy:
        return Strategy(layout, solution, degrees, costs, rules, propagation, count, recompute, devices)

    if not request.search:
        if (solution := inner.price(*begin)) is not None:
            yield strategy("from hints", solution)
        return
    if (solution := inner.best(begin, first=first)) is not None:
        yield strategy("searched", solution)
    for layout, assignment in simple:
        if (solution := inner.price(assignment)) is not None:
            yield strategy(layout, solution)


MOST_MICRO_BATCHES = 64


def meshes(cluster: Cluster, mesh: Mapping[str, int] | None, axis_names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """At most two meshes for any number of devices: one axis, and two axes. The inner of two axes is the devices of a
    node; within one node the two axes are as close to a square as possible."""
    total = cluster.num_devices
    if mesh is not None:
        if math.prod(mesh.values()) != total:
            rule, remedy = f"must have sizes whose product is the number of devices (={total})", "change the sizes"
            raise spec_error("mismatch", "mesh", dict(mesh), rule, remedy)
        yield dict(mesh)
        return
    if len(axis_names) > 2:
        rule, remedy = "name more than two mesh axes without sizes", "pass plan(mesh={name: size}), or name one or two"
        raise spec_error("missing", "hints", ", ".join(axis_names), rule, remedy)
    inner = cluster.devices_per_node
    if cluster.num_nodes == 1 or inner == 1:
        inner = next((d for d in range(math.isqrt(total), 1, -1) if total % d == 0), 1)
    if len(axis_names) < 2:
        yield {axis_names[0] if axis_names else "devices": total}
    if 1 < inner < total:
        outer_name, inner_name = (
            axis_names if len(axis_names) == 2 else ("outer", axis_names[0] if axis_names else "inner")
        )
        yield {outer_name: total // inner, inner_name: inner}
    elif len(axis_names) == 2:
        yield {axis_names[0]: 1, axis_names[1]: total}


def runs(
    capture: CapturedGraph, rules: Rules, micro_batches: int | None, recompute: bool | None
) -> Iterator[tuple[bool, tuple[int, Loop | None]]]:
    """(whether blocks are recomputed, (number of micro-batches, its loop)). When the first run with recomputation is
    returned, the captured graph has been changed to recompute. Raises SpecError if the request is not possible."""
    if not recompute:
        yield from ((False, loop) for loop in _loops(capture, rules, micro_batches))
    if recompute is False:
        return
    if recompute_blocks(capture):
        yield from ((True, loop) for loop in _loops(capture, rules, micro_batches))
    elif recompute:
        rule = "requires blocks: modules in a list that store values for the backward pass"
        remedy = "put layers into an nn.ModuleList, or omit it"
        raise spec_error("requires", "recompute", True, rule, remedy)


def _loops(capture: CapturedGraph, rules: Rules, micro_batches: int | None) -> Iterator[tuple[int, Loop | None]]:
    """Numbers of micro-batches, each with its loop. Raises SpecError if the requested number is not possible."""
    if micro_batches in (None, 1):
        yield 1, None
    elif micro_batches is not None:
        yield micro_batches, loop_of(capture, rules, micro_batches)
    count = 2
    while micro_batches is None and count <= MOST_MICRO_BATCHES:
        try:
            loop = loop_of(capture, rules, count)
        except SpecError:
            return
        yield count, loop
        count *= 2
