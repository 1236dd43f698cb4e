"""Application of a plan to a module: its parts are materialised, and its program is written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from moe.parallel import json_collectives
from moe.sharding.applied.applied import Applied
from moe.sharding.applied.callable_program import CallableProgram, make_callable, program_of
from moe.sharding.applied.materialise import Init, Materialiser, tensors_of
from moe.sharding.applied.other_call import program_of_other_call, without_values
from moe.sharding.applied.programs import Programs
from moe.sharding.arguments import arguments_of_sample, signature_of
from moe.sharding.capture.capture import capture, device_of
from moe.sharding.exchange.mesh import Mesh, OneDevice, ShardingMesh
from moe.sharding.hints.torch_forms import axes_of_mesh, is_ascending
from moe.sharding.placement import WHOLE
from moe.sharding.sample import sample_from_description
from moe.sharding.saved.load import Checkpoint
from moe.sharding.sharding_plan import ShardingPlan
from moe.sharding.solve.request import whole_number_problems
from moe.spec import SpecError, spec_error

MAX_PROGRAMS = 8
"""Default number of programs that an applied module keeps, over its modes and batch sizes."""


def apply(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: Mesh | DeviceMesh | None = None,
    *,
    sample: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    replicate: Sequence[str] = (),
    seed: int = 0,
    init: Init | None = None,
    checkpoint: str | Path | None = None,
    batch: Literal["global", "local"] = "global",
    max_programs: int = MAX_PROGRAMS,
) -> Applied:
    """The module on this rank, sharded by a plan. All ranks call it, with a default process group of as many ranks as
    the plan has. The given module is not changed.

    Parts are copied from the values of the module. For a module on the meta device, values are created one submodule at
    a time: by `init(name, tensor)`, or by the submodule's own `reset_parameters`, with random numbers seeded by (seed,
    name). They are the same for every plan. With `checkpoint`, all values, and the seed and step of random numbers, are
    read from a folder that `sharding.save` has written, or from safetensors files of whole tensors; each rank reads its
    own parts.

    `sample` is the batch, if the plan could not keep it. `loss` is the one that the plan was made with. With
    `batch="global"`, every rank is called with the whole batch, which is compared between ranks from time to time. With
    `batch="local"`, each rank is called with rows of its own, as a DistributedSampler gives them, and the global batch,
    for which the plan was made, is gathered from them in the order of ranks. Batches of other sizes than the plan's,
    such as the last one of an epoch or those of an evaluation, have separate programs over the same parameters, of
    which the `max_programs` most recently used are kept.

    Raises SpecError if the module's graph is not the plan's, if the number of ranks differs, and for tensors on the
    meta device that nothing gives values.
    """
    if batch not in ("global", "local"):
        rule, remedy = 'must be "global" or "local"', 'use "local" if each rank has its own rows'
        raise spec_error("not_a_choice", "batch", batch, rule, remedy)
    if problems := list(whole_number_problems("max_programs", max_programs, 1, "omit it")):
        raise SpecError(problems)
    if not isinstance(mesh, Mesh):
        mesh = _mesh_of(plan, mesh)
    _check_loss(plan, loss)
    arguments = sample_from_description(plan.sample) if sample is None else arguments_of_sample(model, sample)
    captured_graph = capture(model, arguments, loss, device_of(plan.cluster))
    if captured_graph.digest != plan.digest:
        rule = (
            "is not captured as the plan's graph: the module, the batch shapes or torch changed, or forward uses "
            "values that vary between calls"
        )
        raise spec_error("changed", "model", type(model).__name__, rule, "plan again")
    callable_program = make_callable(captured_graph, program_of(captured_graph, plan, replicate), plan, arguments)
    tensors = tensors_of(model)
    used_placements = {
        id(tensor): tensor_placements
        for name, tensor in tensors.items()
        if (tensor_placements := callable_program.program.placements.get(name))
    }
    replicated = (WHOLE,) * len(plan.degrees)  # for tensors that the graph does not use
    placements = {name: used_placements.get(id(tensor), replicated) for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    is_training = model.training
    skeleton, modes = without_values(model), [module.training for module in model.modules()]

    def make(training: bool, other_batch: tuple[Any, ...]) -> CallableProgram:
        skeleton.train(training)
        if training == is_training:
            for module, mode in zip(skeleton.modules(), modes, strict=True):
                module.training = mode
        return program_of_other_call(skeleton, other_batch, loss, plan, replicate, placements)

    mesh.draws.seed = seed
    device = device_of(plan.cluster)
    programs = Programs(callable_program, is_training, make, max_programs)
    applied_module = Applied(mesh, shapes, placements, programs, device, batch == "local", signature_of(model))
    checkpoint_reader = None if checkpoint is None else Checkpoint.open(checkpoint)
    is_given = (lambda names, is_persistent: False) if checkpoint_reader is None else checkpoint_reader.gives
    Materialiser(applied_module, device, seed, init, is_given).fill(model)
    if checkpoint_reader is not None:
        if problems := list(checkpoint_reader.problems(applied_module)):
            raise SpecError(problems)
        checkpoint_reader.fill(applied_module)
    return applied_module.train(is_training)


def _check_loss(plan: ShardingPlan, loss: Callable[[Any], Tensor] | None) -> None:
    """Raises SpecError if the plan was made with a loss and none is given, or the other way round."""
    if plan.loss is not None and loss is None:
        rule, remedy = f"is required: the plan was made with {plan.loss}", "pass the same loss= to sharding.apply"
        raise spec_error("missing", "loss", None, rule, remedy)
    if plan.loss is None and loss is not None:
        name = getattr(loss, "__qualname__", type(loss).__name__)
        raise spec_error("conflict", "loss", name, "is not part of the plan", "omit it, or plan again with loss=...")


def _mesh_of(plan: ShardingPlan, mesh: DeviceMesh | None) -> Mesh:
    """The mesh of a plan, over the ranks in the plan's order, or over the given DeviceMesh. Raises SpecError if sizes
    or the order of ranks differ from the plan's."""
    ranks = json_collectives.world_size()
    if ranks != plan.num_devices:
        rule, remedy = f"must have one rank per process (={ranks})", "plan again for this number of processes"
        raise spec_error("mismatch", "plan.mesh", plan.mesh, rule, remedy)
    if mesh is not None and tuple(mesh.shape) != plan.degrees:
        rule = f"must have the sizes of the plan's mesh (={plan.mesh})"
        remedy = "pass a mesh of these sizes, or plan again with mesh=mesh"
        raise spec_error("mismatch", "mesh", axes_of_mesh(mesh), rule, remedy)
    if mesh is not None and plan.devices and tuple(mesh.mesh.flatten().tolist()) != plan.devices:
        rule = f"must have the ranks in the plan's order (={plan.devices})"
        raise spec_error("mismatch", "mesh", mesh.mesh.tolist(), rule, "omit it")
    if mesh is not None and not is_ascending(mesh):
        rule = "must have ascending ranks along each axis, as torch's process groups do"
        raise spec_error("mismatch", "mesh", mesh.mesh.tolist(), rule, "sort the ranks along each axis")
    if not dist.is_initialized() or ranks == 1:
        return OneDevice((1,) * len(plan.mesh), (0,) * len(plan.mesh))
    if mesh is not None:
        return ShardingMesh.from_device_mesh(mesh)
    return ShardingMesh.from_degrees(plan.degrees, tuple(plan.mesh), device_of(plan.cluster).type, plan.devices)
