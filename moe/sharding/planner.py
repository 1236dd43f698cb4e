"""The plan of any module: captured, its hints found, meshes looked at, the inner plan of each solved."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from moe.parallel import together
from moe.plan.cluster.cluster import Cluster, cluster_of, read_cluster
from moe.sharding.accumulate import AXIS, Loop, classes_of, in_loop, loop_of, pins_in_loop
from moe.sharding.accumulated import steps_of
from moe.sharding.annotate import PLACED
from moe.sharding.assignment import Assignment
from moe.sharding.capture import Captured, capture, device_of
from moe.sharding.hints import Hint
from moe.sharding.named import Annotated, annotated
from moe.sharding.operands import is_operator, operands, shape_of
from moe.sharding.partition.collectives import collectives_of
from moe.sharding.partition.program import Partitioner
from moe.sharding.planned import Considered, Memory, Stored, in_words
from moe.sharding.propagate import Propagated, Propagation, conflicts_in_words
from moe.sharding.recompute import recompute_blocks, with_again
from moe.sharding.repeated import classes
from moe.sharding.rules.registry import Rules
from moe.sharding.rules.rule import result_placements
from moe.sharding.sample import described
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.search import Search
from moe.sharding.solve.solved import Limits, Solved
from moe.spec import Problem, SpecError

OPTIMIZER_SLOTS = 2
"""Values of optimizer state for each trained one, as Adam has."""

LARGEST_CLUSTER = 1 << 14

MOST_MICRO_BATCHES = 64


def plan(
    model: nn.Module,
    sample: Sequence[Any],
    cluster: Cluster | str | Path | None = None,
    hints: Mapping[str, Hint] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    replicate: Sequence[str] = (),
    optimizer_slots: int = OPTIMIZER_SLOTS,
    search: bool = True,
    micro_batches: int | None = None,
    recompute: bool | None = None,
) -> ShardingPlan:
    """The cheapest plan that is found for `model(*sample)` on a cluster, with hints by name for parameters, buffers,
    `inputs`, `inputs.0`, `gradients.NAME` and `optimizer.NAME` (patterns, as of shells).

    A scalar output is the loss; else `loss` of what the module returns is. `mesh` fixes the axes and their sizes.
    Without `search`, tensors lie as propagation from the hints alone has them, as GShard's do. Operators named in
    `replicate` run on whole tensors where they have no rule. The batch is computed in `micro_batches` parts, one after
    the other; where that is not said, in the fewest with which there is room: 1, 2, 4. Blocks are computed again in the
    backward pass (`recompute`) as said, or else where nothing else has room. Without a cluster, it is one device of
    this kind for each rank of the default process group. Where that is up, rank 0 plans, and all ranks call this.

    Raises SpecError for what is wrong with the module or the hints, and for a model that does not fit.
    """
    if isinstance(cluster, str | Path):
        cluster = read_cluster(cluster)
    cluster = cluster or cluster_of({"num_nodes": 1, "devices_per_node": together.world_size()})

    def ask() -> Any:
        try:
            found = _planned(
                model,
                sample,
                cluster,
                hints or {},
                loss,
                mesh,
                replicate,
                optimizer_slots,
                search,
                micro_batches,
                recompute,
            )
            return {"plan": found.to_json()}
        except SpecError as error:
            if together.world_size() == 1:
                raise
            return {"problems": [each.to_dict() for each in error.problems]}

    answer = together.from_first(ask)
    if "problems" in answer:
        raise SpecError([Problem(**each) for each in answer["problems"]])
    return ShardingPlan.from_json(answer["plan"])


def _planned(
    model: nn.Module,
    sample: Sequence[Any],
    cluster: Cluster,
    hints: Mapping[str, Hint],
    loss: Callable[[Any], Tensor] | None,
    mesh: Mapping[str, int] | None,
    replicate: Sequence[str],
    optimizer_slots: int,
    search: bool,
    micro_batches: int | None,
    recompute: bool | None,
) -> ShardingPlan:
    captured = capture(model, sample, loss, device_of(cluster))
    found = annotated(captured, hints)
    Rules(replicate).check(captured.graph.graph)
    limits = Limits(cluster.memory_bytes - captured.input_bytes, optimizer_slots)
    best: tuple[Solved, dict[str, int], Costs, Rules, Propagated | None] | None = None
    considered = []
    ways = list(_meshes(cluster, mesh, found.axes))
    for again, (count, loop) in _runs(captured, Rules(replicate), micro_batches, recompute):
        for degrees in ways:
            pins, rules = with_again(captured, found.pins(degrees)), Rules(replicate, captured.parts, degrees)
            followed = None
            if found.wishes or not search:
                said = {wish.node.name: wish.said for wish in found.wishes}
                followed = Propagation(captured, rules, tuple(degrees.values()), pins, said).propagated()
            begin = [] if followed is None else [followed.assignment]
            alike: Mapping[str, Any] = pins
            if loop is not None:
                pins = pins_in_loop(pins)
                begin, alike = [in_loop(each, loop, count) for each in begin], classes_of(loop, pins)
            costs = Costs(cluster, (*([] if loop is None else [count]), *degrees.values()), loop)
            inner = Search(captured, costs, rules, limits, pins, classes(captured, alike) if search else None)
            solved = inner.best(begin) if search else inner.priced(*begin)
            used = None if solved is None else int(solved.memory_bytes) + captured.input_bytes
            seconds = None if solved is None else solved.seconds
            considered.append(Considered(degrees, seconds, used, count, again))
            if solved is not None and (best is None or solved.seconds < best[0].seconds):
                best = solved, degrees, costs, rules, followed
        if best is not None:
            break
    if best is None:
        raise _does_not_fit(captured, found, replicate, cluster, mesh, limits)
    solved, degrees, costs, rules, followed = best
    assignment = solved.assignment
    program = Partitioner(captured, assignment, rules, costs.moves).program()
    axes = tuple(degrees)
    if costs.loop is not None:
        steps_of(program, captured, count)
    return ShardingPlan(
        mesh=dict(degrees),
        digest=captured.digest,
        sample=described(sample),
        parameters={
            name: in_words(placements[-len(axes) :]) for name, placements in program.placements.items()
        },
        options={name: [each.name for each in options] for name, options in assignment.options.items()},
        kept=sorted((name, in_words(placements)) for name, placements in assignment.kept),
        hints=dict(hints),
        cluster=cluster,
        step_s=solved.seconds,
        relaxed_s=solved.relaxed_s,
        memory=_memory(captured, assignment, costs, solved, optimizer_slots),
        collectives=collectives_of(
            program, axes if costs.loop is None else (AXIS, *axes), assignment.degrees, captured
        ),
        stored=_stored(captured),
        annotated=_annotated_placements(captured, assignment, len(axes)),
        considered=tuple(considered),
        conflicts=tuple(conflicts_in_words(followed.conflicts if followed else (), axes)),
        micro_batches=count,
        recompute=again,
    )


def _runs(
    captured: Captured, rules: Rules, micro_batches: int | None, recompute: bool | None
) -> Iterator[tuple[bool, tuple[int, Loop | None]]]:
    """Ways to run a step: (whether blocks are computed again, which the captured graph then does; a number of
    micro-batches and its loop). Raises SpecError where what is asked for is not possible."""
    if not recompute:
        yield from ((False, each) for each in _loops(captured, rules, micro_batches))
    if recompute is False:
        return
    if recompute_blocks(captured):
        yield from ((True, each) for each in _loops(captured, rules, micro_batches))
    elif recompute:
        raise SpecError(Problem("recompute", True, "needs blocks: modules in a list, of whose values the backward pass "
                                "needs some", "put layers into an nn.ModuleList, or leave it out"))  # fmt: skip


def _loops(captured: Captured, rules: Rules, micro_batches: int | None) -> Iterator[tuple[int, Loop | None]]:
    """Numbers of micro-batches, each with its loop. Raises SpecError where what is asked for is not possible."""
    if micro_batches is not None and micro_batches < 1:
        raise SpecError(Problem("micro_batches", micro_batches, "must be at least 1", "use 1 or more"))
    if micro_batches in (None, 1):
        yield 1, None
    elif micro_batches is not None:
        yield micro_batches, loop_of(captured, rules, micro_batches)
    count = 2
    while micro_batches is None and count <= MOST_MICRO_BATCHES:
        try:
            loop = loop_of(captured, rules, count)
        except SpecError:
            return
        yield count, loop
        count *= 2


def _meshes(
    cluster: Cluster, given: Mapping[str, int] | None, named: tuple[str, ...]
) -> Iterator[dict[str, int]]:
    """A few meshes, however many devices there are: one axis; two, of which the inner one stays within a node; where
    there is one node, two as square as can be."""
    total = cluster.num_devices
    if given is not None:
        are_whole = all(type(size) is int and size > 0 for size in given.values())
        if not are_whole or math.prod(given.values()) != total or not 1 <= len(given) <= 2:
            raise SpecError(Problem("mesh", dict(given), 
                                    f"must be one or two axes of 1 device or more, which multiply to all (={total})",
                                    "correct their sizes"))  # fmt: skip
        yield dict(given)
        return
    if len(named) > 2:
        raise SpecError(Problem("hints", ", ".join(named), "name more than two mesh axes", "name one or two"))
    inner = cluster.devices_per_node
    if cluster.num_nodes == 1 or inner == 1:
        inner = next((d for d in range(math.isqrt(total), 1, -1) if total % d == 0), 1)
    if len(named) < 2:
        yield {named[0] if named else "devices": total}
    if 1 < inner < total:
        outer_name, inner_name = named if len(named) == 2 else ("outer", named[0] if named else "inner")
        yield {outer_name: total // inner, inner_name: inner}
    elif len(named) == 2:
        yield {named[0]: 1, named[1]: total}


def _stored(captured: Captured) -> tuple[Stored, ...]:
    """In the order in which they are used."""
    at = {node: number for number, node in enumerate(captured.graph.graph.nodes)}
    leaves = [(node, leaf) for node, leaf in captured.leaves.items() if leaf.kind in ("parameter", "buffer")]
    leaves.sort(key=lambda each: min((at[user] for user in each[0].users), default=0))
    return tuple(
        Stored(leaf.name, leaf.kind, list(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for _, leaf in leaves
    )


def _memory(
    captured: Captured, assignment: Assignment, costs: Costs, solved: Solved, optimizer_slots: int
) -> Memory:
    parameters = trained = buffers = 0
    for node, leaf in captured.leaves.items():
        if leaf.kind not in ("parameter", "buffer", "constant"):
            continue
        held = costs.part_bytes(leaf.shape, leaf.dtype.itemsize, assignment.leaves[node.name])
        if leaf.kind == "parameter":
            parameters += held
            trained += held if leaf.name in captured.gradients else 0
        else:
            buffers += held
    inputs = captured.input_bytes
    largest = int(solved.largest_bytes)
    kept = int(solved.memory_bytes) - parameters - trained * (1 + optimizer_slots) - buffers - largest
    return Memory(parameters, trained, trained * optimizer_slots, buffers, max(0, kept), inputs, largest)


def _annotated_placements(captured: Captured, assignment: Assignment, num_axes: int) -> dict[str, str]:
    return {
        f"{_said_of(captured, node)} {list(shape_of(node))}": in_words(
            result_placements(assignment.options[node.name])[-num_axes:]
        )
        for node in captured.graph.graph.nodes
        if is_operator(node) and node.target is PLACED
    }


def _said_of(captured: Captured, node: fx.Node) -> str:
    """What is annotated: the line, or the name of what a graph begins with."""
    leaf = captured.leaves.get(operands(node)[0])
    return str(node.meta.get("where") or (leaf.name if leaf else node.name))


def _does_not_fit(
    captured: Captured,
    found: Annotated,
    replicate: Sequence[str],
    cluster: Cluster,
    mesh: Mapping[str, int] | None,
    limits: Limits,
) -> SpecError:
    """In words: which hints are in the way, or how large a cluster would have to be."""

    def fits(on: Cluster, degrees: Mapping[str, int], without: frozenset[str]) -> bool:
        costs = Costs(on, tuple(degrees.values()))
        pins, rules = (
            with_again(captured, found.pins(degrees, without)),
            Rules(replicate, captured.parts, degrees),
        )
        return Search(captured, costs, rules, limits, pins, classes(captured, pins)).best() is not None

    def fits_some(on: Cluster, without: frozenset[str], given: Mapping[str, int] | None) -> bool:
        return any(fits(on, degrees, without) for degrees in _meshes(on, given, found.axes))

    shown = f"{limits.memory_bytes / 2**30:.2f} GiB"
    said = list(dict.fromkeys(wish.said for wish in found.wishes))
    if said and fits_some(cluster, frozenset(said), mesh):
        needed = set(said)  # fewest that together leave no room: each is dropped where the rest still does
        for each in said:
            if not fits_some(cluster, frozenset(set(said) - (needed - {each})), mesh):
                needed.discard(each)
        dropped = "one of them" if len(needed) > 1 else "it"
        return SpecError(Problem(" and ".join(sorted(needed)), None,
                                 f"cannot be had: with that no plan fits in the memory of a device (={shown})",
                                 f"drop {dropped}, or use devices with more memory"))  # fmt: skip
    devices = cluster.num_devices
    while devices < LARGEST_CLUSTER:
        devices *= 2
        larger = cluster.of(devices)
        if mesh is None and fits_some(larger, frozenset(), None):
            remedy = f"use {devices} devices: doubled, the first cluster of this kind that has"
            return SpecError(Problem("cluster", f"{cluster.num_devices} x {cluster.device}",
                                     f"has no room for the model: no plan fits in {shown} a device",
                                     remedy))  # fmt: skip
        if mesh is not None:
            break
    return SpecError(Problem("cluster", f"{cluster.num_devices} x {cluster.device}",
                             f"has no room for the model: no plan fits in {shown} a device",
                             "use devices with more memory, a smaller batch or another mesh"))  # fmt: skip
