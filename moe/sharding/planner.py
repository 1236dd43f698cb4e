"""Planning of a module: it is captured, hints are resolved, and placements are solved for each candidate mesh."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Placement

from moe.parallel.problems import ask_rank0
from moe.plan.cluster.cluster import Cluster
from moe.sharding.applied.accumulation import steps_of
from moe.sharding.arguments import arguments_of_sample
from moe.sharding.capture.capture import CapturedGraph
from moe.sharding.hints.annotate import PLACED
from moe.sharding.hints.hints import Hint
from moe.sharding.hints.torch_forms import axes_of_mesh, hints_of_torch
from moe.sharding.operands import is_operator, operands, shape_of
from moe.sharding.partition.collectives import collectives_of
from moe.sharding.partition.program import Partitioner
from moe.sharding.plan_records import Memory, StoredTensor, in_words
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.propagation.propagate import conflicts_in_words
from moe.sharding.rules.rule import result_placements
from moe.sharding.sample import describe
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.accumulate import AXIS
from moe.sharding.solve.captured_request import capture_request
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.no_room import no_room
from moe.sharding.solve.request import ShardingRequest, resolve_cluster
from moe.sharding.solve.solution import ShardingSolution
from moe.sharding.solve.strategies import best_strategy

OPTIMIZER_SLOTS = 2
"""Default number of values of optimizer state per trained value: 2, as for Adam."""


def plan(
    model: nn.Module,
    sample: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str | Path | None = None,
    hints: Mapping[str, Hint | Placement | Sequence[Placement]] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
    replicate: Sequence[str] = (),
    optimizer_slots: int = OPTIMIZER_SLOTS,
    search: bool = True,
    micro_batches: int | None = None,
    recompute: bool | None = None,
) -> ShardingPlan:
    """The cheapest plan found for `model(*sample)` on a cluster.

    `sample` is a tuple or list of arguments, or a mapping: `model(**sample)` with inputs named `inputs.labels`, or
    `model(sample)` if forward has no such arguments. A scalar output is the loss; otherwise the loss is `loss` of the
    module's result.

    `hints` are placements by name or shell pattern: of parameters, buffers, `inputs`, `inputs.0`, `gradients.NAME` and
    `optimizer.NAME`. DTensor's placements may be used: `Shard(0)`, or a list with one for each axis of `mesh`. Without
    hints, data parallelism as in DDP, or else fully sharded parameters as in FSDP, is chosen if it is predicted to be
    slower than the cheapest plan by no more than the error of predictions. Without `search`, placements are those that
    propagation of the hints gives, as in GShard.

    `mesh` fixes the axes and their sizes. Operators named in `replicate` run on whole tensors if they have no rule. The
    batch is computed in `micro_batches` parts, one after the other; by default in the smallest number of 1, 2, 4 and so
    on with which the model fits in memory. `recompute` is whether blocks are recomputed in the backward pass; by
    default they are if nothing fits otherwise. `optimizer_slots` is the number of values of optimizer state per trained
    value.

    Without `cluster`, it is one device of this machine's kind for each rank of the default process group. If there is a
    process group, all ranks call this function; rank 0 plans, and the others wait for as long as it takes. Progress is
    printed on standard error if planning takes longer than some seconds.

    Raises SpecError for an invalid module or hint, and for a model that does not fit in memory.
    """

    def ask() -> Any:
        axes = axes_of_mesh(mesh)
        request = ShardingRequest(
            model=model, sample=arguments_of_sample(model, sample), cluster=resolve_cluster(cluster),
            hints=hints_of_torch({} if hints is None else hints, axes), loss=loss, mesh=axes,
            replicate=replicate, optimizer_slots=optimizer_slots, search=search, micro_batches=micro_batches,
            recompute=recompute,
        )  # fmt: skip
        with request.progress:
            return _make_plan(request).to_json()

    return ShardingPlan.from_json(ask_rank0(ask))


def _make_plan(request: ShardingRequest) -> ShardingPlan:
    subject = capture_request(request)
    capture = subject.capture
    best, candidates = best_strategy(subject)
    if best is None:
        raise no_room(subject)
    solution, costs, axes = best.solution, best.costs, tuple(best.degrees)
    assignment = solution.assignment
    request.progress.set_stage("writing the program")
    program = Partitioner(capture, assignment, best.rules, costs.moves).program()
    if costs.loop is not None:
        steps_of(program, capture, best.count)
    return ShardingPlan(
        mesh=dict(best.degrees),
        digest=capture.digest,
        sample=describe(request.sample),
        parameters={name: in_words(placements[-len(axes) :]) for name, placements in program.placements.items()},
        options={name: [option.name for option in options] for name, options in assignment.options.items()},
        kept=sorted((name, in_words(placements)) for name, placements in assignment.kept_tensors),
        hints=dict(request.hints),
        cluster=request.cluster,
        step_s=solution.seconds,
        relaxed_s=solution.relaxed_s,
        memory=_memory(capture, assignment, costs, solution, request.optimizer_slots),
        collectives=collectives_of(program, axes if costs.loop is None else (AXIS, *axes), assignment.degrees, capture),
        stored=_stored_tensors(capture),
        annotated=_annotated_placements(capture, assignment, len(axes)),
        considered=tuple(candidates),
        conflicts=tuple(conflicts_in_words(best.propagation.conflicts if best.propagation else (), axes)),
        devices=() if best.devices == tuple(range(len(best.devices))) else best.devices,
        micro_batches=best.count,
        recompute=best.recompute,
        layout=best.layout,
        loss=None if request.loss is None else getattr(request.loss, "__qualname__", type(request.loss).__name__),
    )


def _stored_tensors(capture: CapturedGraph) -> tuple[StoredTensor, ...]:
    """Parameters and buffers, in the order in which they are used."""
    positions = {node: number for number, node in enumerate(capture.graph.graph.nodes)}
    leaves = [(node, leaf) for node, leaf in capture.leaves.items() if leaf.kind in ("parameter", "buffer")]
    leaves.sort(key=lambda entry: min((positions[user] for user in entry[0].users), default=0))
    return tuple(
        StoredTensor(leaf.name, leaf.kind, list(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for _, leaf in leaves
    )


def _memory(
    capture: CapturedGraph, assignment: Assignment, costs: Costs, solution: ShardingSolution, optimizer_slots: int
) -> Memory:
    parameters = trained_bytes = buffers = 0
    for node, leaf in capture.leaves.items():
        if leaf.kind not in ("parameter", "buffer", "constant"):
            continue
        num_bytes = costs.part_bytes(leaf.shape, leaf.dtype.itemsize, assignment.leaves[node.name])
        if leaf.kind == "parameter":
            parameters += num_bytes
            trained_bytes += num_bytes if leaf.name in capture.gradients else 0
        else:
            buffers += num_bytes
    inputs = capture.input_bytes
    largest = int(solution.largest_bytes)
    kept_bytes = int(solution.memory_bytes) - parameters - trained_bytes * (1 + optimizer_slots) - buffers - largest
    return Memory(
        parameters, trained_bytes, trained_bytes * optimizer_slots, buffers, max(0, kept_bytes), inputs, largest
    )


def _annotated_placements(capture: CapturedGraph, assignment: Assignment, num_axes: int) -> dict[str, str]:
    return {
        f"{_annotation_label(capture, node)} {list(shape_of(node))}": in_words(
            result_placements(assignment.options[node.name])[-num_axes:]
        )
        for node in capture.graph.graph.nodes
        if is_operator(node) and node.target is PLACED
    }


def _annotation_label(capture: CapturedGraph, node: fx.Node) -> str:
    """Label of an annotation: its line, or the name of the annotated input, parameter or buffer."""
    leaf = capture.leaves.get(operands(node)[0])
    return str(node.meta.get("line") or (leaf.name if leaf else node.name))
