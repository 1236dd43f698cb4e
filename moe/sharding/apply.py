"""A plan applied to a module: its parts materialised, its program made."""

import copy
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from moe.parallel import together
from moe.sharding.accumulated import steps_of
from moe.sharding.applied import Applied, Ready
from moe.sharding.assignment import Assignment
from moe.sharding.batch import leaves_of
from moe.sharding.capture import TENSOR, Captured, capture, device_of
from moe.sharding.materialise import Init, Materialiser, tensors_of
from moe.sharding.mesh import Mesh, OneDevice, ShardingMesh
from moe.sharding.moves import Moves
from moe.sharding.named import annotated
from moe.sharding.operands import is_operator
from moe.sharding.partition.buckets import bucketed, put_in_buckets
from moe.sharding.partition.program import Partitioner, Program
from moe.sharding.placement import WHOLE, Placements
from moe.sharding.planned import of_words
from moe.sharding.recompute import recompute_blocks
from moe.sharding.rules.registry import Rules
from moe.sharding.rules.rule import AxisOption
from moe.sharding.sample import of_description
from moe.sharding.saved.load import Checkpoint
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.placements import PlacementProgram
from moe.sharding.solve.solved import Limits
from moe.spec import Problem, SpecError


def apply(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: Mesh | None = None,
    *,
    sample: Sequence[Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    replicate: Sequence[str] = (),
    seed: int = 0,
    init: Init | None = None,
    checkpoint: str | Path | None = None,
) -> Applied:
    """The module on this rank, by a plan. All ranks call it, with a default process group over as many as the plan has.

    Parts are cut from the values that the module has. One on the meta device is given values module by module, by
    `init(name, tensor)`, or by each module's own `reset_parameters` with a generator seeded by (seed, name): the same
    for every plan, and never more than one module's at a time; what neither fills is refused. Or all values, and the
    seed and step of random numbers, are those of a `checkpoint`, a folder that `sharding.save` has written or one with
    whole tensors in files of safetensors: each rank reads its own parts. The module itself is left as it was.

    `sample` is the batch, where the plan could not keep it, `loss` the one that it was planned with. Raises SpecError
    where the module's graph is not the plan's, for another number of ranks, and for what has no values.
    """
    mesh = mesh or _mesh_of(plan)
    batch = tuple(sample) if sample is not None else of_description(plan.sample)
    captured = capture(model, batch, loss, device_of(plan.cluster))
    if captured.digest != plan.digest:
        rule = (
            "is captured as another graph than the plan's: module, shapes of the batch or torch have changed, or "
            "forward has values of its own that are not always the same"
        )
        raise SpecError(Problem("model", type(model).__name__, rule, "plan again"))
    program = program_of(captured, plan, replicate)
    steps = steps_of(program, captured, plan.micro_batches) if plan.micro_batches > 1 else None
    if steps is not None:
        program = replace(program, placements={name: at[1:] for name, at in program.placements.items()})
        for each in steps.graphs:
            put_in_buckets(each, (plan.micro_batches, *plan.degrees))
    shapes = {
        leaf.name: leaf.shape for leaf in captured.leaves.values() if leaf.kind in ("parameter", "buffer")
    }
    placements = dict(program.placements)
    for first, names in captured.tied.items():
        if first in placements:
            shapes |= dict.fromkeys(names, shapes[first])
            placements |= dict.fromkeys(names, placements[first])
    for name, tensor in tensors_of(model).items():  # those that the graph does not use lie whole
        shapes.setdefault(name, tuple(tensor.shape))
        placements.setdefault(name, (WHOLE,) * len(plan.degrees))
    is_training = model.training
    skeleton = _without_values(model)

    def ready(training: bool) -> Ready:
        if training == is_training:
            return replace(_ready(captured, program, batch), steps=steps)
        return _other_mode(skeleton, training, batch, loss, plan, replicate, placements)

    mesh.draws.seed = seed
    device = device_of(plan.cluster)
    applied = Applied(mesh, shapes, placements, ready, device)
    stored = None if checkpoint is None else Checkpoint.at(checkpoint)
    is_given = (lambda names, is_persistent: False) if stored is None else stored.gives
    Materialiser(applied, device, shapes, placements, seed, init, is_given).fill(model)
    if stored is not None:
        if problems := list(stored.problems(applied)):
            raise SpecError(problems)
        stored.fill(applied)
    return applied.train(is_training)


def program_of(captured: Captured, plan: ShardingPlan, replicate: Sequence[str] = ()) -> Program:
    """The program of a plan for a graph, which is changed: hints become annotations. With micro-batches, the loop over
    them is axis 0 of its mesh. Raises SpecError for choices that are not possible."""
    annotated(captured, plan.hints)
    if plan.recompute:
        recompute_blocks(captured)
    rules = Rules(replicate, captured.parts, plan.mesh)
    degrees, is_loop = plan.degrees, plan.micro_batches > 1
    if is_loop:
        degrees = (plan.micro_batches, *degrees)
    assignment = _assignment(captured, plan, degrees, rules)
    program = Partitioner(captured, assignment, rules, Moves(plan.cluster, degrees, is_loop)).program()
    return program if is_loop else bucketed(program, degrees)


def _mesh_of(plan: ShardingPlan) -> Mesh:
    ranks = together.world_size()
    if ranks != plan.num_devices:
        raise SpecError(Problem("plan.mesh", plan.mesh, f"must have as many ranks as there are processes (={ranks})",
                                "plan again for the processes there are"))  # fmt: skip
    if not dist.is_initialized() or ranks == 1:
        return OneDevice((1,) * len(plan.mesh), (0,) * len(plan.mesh))
    return ShardingMesh.over(plan.degrees)


def _assignment(
    captured: Captured, plan: ShardingPlan, degrees: tuple[int, ...], rules: Callable[[fx.Node], Any]
) -> Assignment:
    """The plan's choices. Raises SpecError for one that is not possible."""
    options = {}
    for node in captured.graph.graph.nodes:
        if not is_operator(node):
            continue
        by_name: dict[str, AxisOption] = {each.name: each for each in rules(node).axis_options()}
        chosen = plan.options.get(node.name, ())
        if len(chosen) != len(degrees) or not set(chosen) <= set(by_name):
            raise SpecError(Problem(f"plan.options.{node.name}", chosen, f"must be options of {node.target} "
                                    f"(={', '.join(by_name)}), one for each mesh axis", "plan again"))  # fmt: skip
        options[node.name] = tuple(by_name[each] for each in chosen)
        if not rules(node).is_possible(options[node.name], degrees):
            raise SpecError(Problem(f"plan.options.{node.name}", chosen, f"cannot be had together by {node.target} on "
                                    f"{plan.mesh}", "plan again"))  # fmt: skip
    leaves = {
        node.name: (WHOLE,) * (len(degrees) - len(plan.mesh)) + of_words(plan.parameters[leaf.name])
        for node, leaf in captured.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }
    kept = frozenset((name, of_words(placements)) for name, placements in plan.kept)
    return Assignment(degrees, leaves, options, kept)


def _ready(captured: Captured, program: Program, batch: Sequence[Any]) -> Ready:
    values = tuple(TENSOR if isinstance(each, fx.Node) else each for each in captured.outputs)
    return Ready(program, captured.output_tree, values, leaves_of(batch), pytree.tree_structure(list(batch)))


def _other_mode(
    skeleton: nn.Module,
    training: bool,
    batch: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    plan: ShardingPlan,
    replicate: Sequence[str],
    placements: dict[str, Placements],
) -> Ready:
    """The program of evaluation, where the plan is one of training, with the same parts of parameters."""
    captured = capture(skeleton.train(training), batch, loss, device_of(plan.cluster))
    annotated(captured, plan.hints)
    rules = Rules(replicate, captured.parts, plan.mesh)
    costs = Costs(plan.cluster, plan.degrees)
    pins = {
        node.name: placements[leaf.name]
        for node, leaf in captured.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }

    def solve() -> dict[str, Any]:
        found = PlacementProgram(captured, costs, rules, Limits(float("inf")), pins).solved()
        assert found is not None
        return {name: [each.name for each in options] for name, options in found.assignment.options.items()}

    chosen = together.from_first(solve)
    options = {}
    for node in captured.graph.graph.nodes:
        if is_operator(node):
            by_name = {each.name: each for each in rules(node).axis_options()}
            options[node.name] = tuple(by_name[name] for name in chosen[node.name])
    assignment = Assignment(plan.degrees, pins, options)
    program = Partitioner(captured, assignment, rules, costs.moves).program()
    return _ready(captured, bucketed(program, plan.degrees), batch)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device. What cannot be copied, such as a lock or an open file, is the same in both."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        if isinstance(each, nn.Parameter)
        else torch.empty_like(each, device="meta")
        for each in tensors_of(model).values()
    }
    modules = list(model.modules())
    for each in modules:
        memo[id(each)] = type(each).__new__(type(each))
    for each in modules:
        vars(memo[id(each)]).update({name: _copied(value, memo) for name, value in vars(each).items()})
    return memo[id(model)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, in which what is in `memo` has its copy there; where there can be none, the value itself."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    made: dict[int, Any] = {}
    try:
        found = copy.deepcopy(value, ChainMap(made, memo))  # type: ignore[arg-type]
    except Exception:  # whatever a user's class raises; half of a copy is in `made` alone
        if type(value) not in (list, tuple, dict):
            return value
        if type(value) is dict:
            return {key: _copied(each, memo) for key, each in value.items()}
        return type(value)(_copied(each, memo) for each in value)
    memo.update(made)
    return found
