"""A plan applied to a module: its parts materialised, its program made."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from moe.parallel import together
from moe.random import fold_name
from moe.sharding.applied import Applied, Part, Ready, leaves_of, values_of
from moe.sharding.assignment import Assignment
from moe.sharding.capture import Captured, capture, device_of
from moe.sharding.exchange import part_of, unpadded
from moe.sharding.mesh import Mesh, OneDevice, ShardingMesh
from moe.sharding.moves import Moves
from moe.sharding.named import annotated
from moe.sharding.operands import is_operator
from moe.sharding.parameters import PartOfParameter
from moe.sharding.partition.program import Partitioner, Program
from moe.sharding.placement import WHOLE, Placements
from moe.sharding.rules.registry import Rules
from moe.sharding.rules.rule import AxisOption
from moe.sharding.sample import of_description
from moe.sharding.sharding_plan import ShardingPlan, of_words
from moe.sharding.solve.costs import Costs
from moe.sharding.solve.placements import Limits, PlacementProgram
from moe.spec import Problem, SpecError

Init = Callable[[str, Tensor], None]
"""Fills a whole tensor, given its name."""


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
) -> Applied:
    """The module on this rank, by a plan. All ranks call it, with a default process group over as many as the plan has.

    Parts are cut from the values that the module has. One on the meta device is given values module by module, by
    `init(name, tensor)`, or by each module's own `reset_parameters` with a generator seeded by (seed, name): the same
    for every plan, and never more than one module's at a time. The module itself is left as it was.

    `sample` is the batch, where the plan could not keep it, `loss` the one that it was planned with. Raises SpecError
    where the module's graph is not the plan's, for another number of ranks, and for what has no values.
    """
    mesh = mesh or _mesh_of(plan)
    batch = tuple(sample) if sample is not None else of_description(plan.sample)
    captured = capture(model, batch, loss, device_of(plan.cluster))
    if captured.digest != plan.digest:
        rule = (
            "is captured as another graph than the plan's: module, shapes of the batch or torch have changed"
        )
        raise SpecError(Problem("model", type(model).__name__, rule, "plan again"))
    program = program_of(captured, plan, replicate)
    shapes = {
        leaf.name: leaf.shape for leaf in captured.leaves.values() if leaf.kind in ("parameter", "buffer")
    }
    placements = dict(program.placements)
    for name, tensor in _tensors(model).items():  # those that the graph does not use lie whole
        shapes.setdefault(name, tuple(tensor.shape))
        placements.setdefault(name, (WHOLE,) * len(plan.degrees))
    is_training = model.training
    skeleton = _without_values(model)

    def ready(training: bool) -> Ready:
        if training == is_training:
            return _ready(captured, program, batch)
        return _other_mode(skeleton, training, batch, loss, plan, replicate, placements)

    mesh.draws.seed = seed
    applied = Applied(mesh, shapes, placements, ready)
    _fill(applied, model, device_of(plan.cluster), shapes, placements, seed, init)
    return applied.train(is_training)


def program_of(captured: Captured, plan: ShardingPlan, replicate: Sequence[str] = ()) -> Program:
    """The program of a plan for a graph, which is changed: hints become annotations. Raises SpecError for choices that
    are not possible."""
    annotated(captured, plan.hints)
    rules = Rules(replicate, captured.parts, plan.mesh)
    assignment = _assignment(captured, plan, rules)
    return Partitioner(captured, assignment, rules, Moves(plan.cluster, plan.degrees)).program()


def _mesh_of(plan: ShardingPlan) -> Mesh:
    ranks = together.world_size()
    if ranks != plan.num_devices:
        raise SpecError(Problem("plan.mesh", plan.mesh, f"must have as many ranks as there are processes (={ranks})",
                                "plan again for the processes there are"))  # fmt: skip
    if not dist.is_initialized() or ranks == 1:
        return OneDevice((1,) * len(plan.mesh), (0,) * len(plan.mesh))
    return ShardingMesh.over(plan.degrees)


def _assignment(captured: Captured, plan: ShardingPlan, rules: Callable[[fx.Node], Any]) -> Assignment:
    """The plan's choices. Raises SpecError for one that is not possible."""
    options = {}
    for node in captured.graph.graph.nodes:
        if not is_operator(node):
            continue
        by_name: dict[str, AxisOption] = {each.name: each for each in rules(node).axis_options()}
        chosen = plan.options.get(node.name, ())
        if len(chosen) != len(plan.mesh) or not set(chosen) <= set(by_name):
            raise SpecError(Problem(f"plan.options.{node.name}", chosen, f"must be options of {node.target} "
                                    f"(={', '.join(by_name)}), one for each mesh axis", "plan again"))  # fmt: skip
        options[node.name] = tuple(by_name[each] for each in chosen)
        if not rules(node).is_possible(options[node.name], plan.degrees):
            raise SpecError(Problem(f"plan.options.{node.name}", chosen, f"cannot be had together by {node.target} on "
                                    f"{plan.mesh}", "plan again"))  # fmt: skip
    leaves = {
        node.name: of_words(plan.parameters[leaf.name])
        for node, leaf in captured.leaves.items()
        if leaf.kind in ("parameter", "buffer")
    }
    kept = frozenset((name, of_words(placements)) for name, placements in plan.kept)
    return Assignment(plan.degrees, leaves, options, kept)


def _ready(captured: Captured, program: Program, batch: Sequence[Any]) -> Ready:
    values = values_of(captured.outputs, lambda each: isinstance(each, fx.Node))
    return Ready(program, captured.output_tree, values, leaves_of(batch))


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
    return _ready(captured, Partitioner(captured, assignment, rules, costs.moves).program(), batch)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def _without_values(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        if isinstance(each, nn.Parameter)
        else torch.empty_like(each, device="meta")
        for each in _tensors(model).values()
    }
    return copy.deepcopy(model, memo)


def _fill(
    applied: Applied,
    model: nn.Module,
    device: torch.device,
    shapes: dict[str, tuple[int, ...]],
    placements: dict[str, Placements],
    seed: int,
    init: Init | None,
) -> None:
    """Modules with this rank's parts, one after the other."""
    first = {id(tensor): name for name, tensor in reversed(_tensors(model).items())}
    made: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        _add_module(applied, path)
        wholes = None
        own = [*module._parameters.items(), *module._buffers.items()]
        for last, tensor in own:
            if tensor is None:
                continue
            name = f"{path}.{last}" if path else last
            canonical = first[id(tensor)]
            if canonical not in made:
                if tensor.is_meta and wholes is None:
                    wholes = _initial(module, path, seed, init)
                whole = wholes[last] if tensor.is_meta and wholes is not None else tensor.detach()
                at = placements[canonical]
                part = unpadded(part_of(whole, at, applied.mesh), whole.shape, at, applied.mesh)
                part = part.to(device, copy=True)
                made[canonical] = _part(applied, canonical, part, tensor, at)
            owner = applied.get_submodule(path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(last, made[canonical])  # type: ignore[arg-type]
            else:
                owner.register_buffer(last, made[canonical], last not in module._non_persistent_buffers_set)
            applied._shapes.setdefault(name, shapes[canonical])
            applied._placements.setdefault(name, placements[canonical])


def _part(applied: Applied, name: str, part: Tensor, tensor: Tensor, placements: Placements) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return part
    made = PartOfParameter(part, requires_grad=tensor.requires_grad)
    object.__setattr__(made, "applied", applied)
    made.is_cut = any(
        each.dim is not None and degree > 1
        for each, degree in zip(placements, applied.mesh.degrees, strict=True)
    )
    made.is_first = applied.shard_of(name, part).is_first
    return made


def _add_module(applied: Applied, path: str) -> None:
    owner: nn.Module = applied
    for step in path.split(".") if path else ():
        if step not in owner._modules:
            owner.add_module(step, Part())
        owner = owner._modules[step]  # type: ignore[assignment]


def _initial(module: nn.Module, path: str, seed: int, init: Init | None) -> dict[str, Tensor]:
    """Whole values of one module's own parameters and buffers."""
    shell = copy.copy(module)
    shell._parameters, shell._buffers = dict(module._parameters), dict(module._buffers)
    shell._modules = {}
    values: dict[str, Tensor] = {}
    for name, parameter in shell._parameters.items():
        if parameter is not None:
            values[name] = torch.zeros(parameter.shape, dtype=parameter.dtype)
            shell._parameters[name] = nn.Parameter(values[name], requires_grad=False)
    for name, buffer in shell._buffers.items():
        if buffer is not None:
            values[name] = shell._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    prefix = f"{path}." if path else ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_name(seed, path) & (2**63 - 1))
        if init is not None:
            for name, value in values.items():
                init(prefix + name, value)
        elif hasattr(shell, "reset_parameters"):
            shell.reset_parameters()  # type: ignore[operator]
        elif values:
            rule = (
                f"has no values, and {type(module).__name__} has no reset_parameters that would give it some"
            )
            remedy = "give apply(init=...) or a module that has values"
            raise SpecError([Problem(prefix + name, "meta", rule, remedy) for name in values])
    return values
