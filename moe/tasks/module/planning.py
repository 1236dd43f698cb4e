"""Plan of a module job: `moe.sharding` applied to the module's first batch."""

from dataclasses import asdict

from moe import sharding
from moe.plan import Cluster, Degrees, MemoryEstimate, ModuleLayout, Plan, TimeEstimate
from moe.plan.money import estimate_money
from moe.plan.plan_file import made_for
from moe.sharding.hints.hints import hint_from_plain
from moe.spec import JobSpec, ModuleDataSpec, ModuleModelSpec, MuonSpec, OptimizerSpec, SpecError, spec_error
from moe.tasks.module.build import batches, build_without_values, num_rows


def plan_module_job(spec: JobSpec, cluster: Cluster) -> Plan:
    """Plan a job on all devices of a cluster. Callers must have checked permission to call the job's functions.

    Raises SpecError if the job cannot be planned, and any exception of the functions.
    """
    assert isinstance(spec.model, ModuleModelSpec)
    assert isinstance(spec.data, ModuleDataSpec)
    sample = batches(spec.data, spec.train.seed)(0)
    module = build_without_values(spec.model, spec.train.seed)
    hints = {name: hint_from_plain(hint, f"model.hints.{name}") for name, hint in spec.model.hints.items()}
    if cluster.num_devices == 1:
        hints = {}  # one device holds everything
    sharding_plan = sharding.plan(module, sample=sample, cluster=cluster, hints=hints)
    check_optimizer(spec.train.optimizer, sharding_plan)
    return _in_job(spec, cluster, sharding_plan, num_rows(sample))


def check_optimizer(optimizer: OptimizerSpec, plan: sharding.ShardingPlan) -> None:
    """Raise SpecError if a parameter is split whose update needs all of its elements, or a parameter group has none."""
    if problems := list(optimizer.group_problems(plan.parameters)):
        raise SpecError(problems)
    if isinstance(optimizer, MuonSpec):
        raise spec_error("not_applicable", "train.optimizer.name", optimizer.name,
                         "does not apply to a user's module, whose hidden matrices are unknown",
                         "use adamw or adafactor")  # fmt: skip
    if optimizer.is_elementwise:
        return
    for name, placements in plan.parameters.items():
        if "S(" in placements:
            raise spec_error("unsupported", "train.optimizer.name", optimizer.name,
                        f"has statistics of whole tensors, but {name} is split ({placements})",
                        "use adamw, or one worker")  # fmt: skip


def _in_job(spec: JobSpec, cluster: Cluster, sharding_plan: sharding.ShardingPlan, rows: int) -> Plan:
    memory, device = asdict(sharding_plan.memory), cluster.calibrated_device.kind
    state = memory["parameters"] + memory["buffers"] + memory["optimizer"]
    estimate = MemoryEstimate(
        parameters=memory["parameters"] + memory["buffers"], gradients=memory["gradients"],
        optimizer=memory["optimizer"], activations=memory["kept"] + memory["inputs"], dispatch=0,
        workspace=memory["largest_operator"], logits=0, communication=0, staging=state if device == "cpu" else 0,
        limit=cluster.memory_bytes,
    )  # fmt: skip
    ranks = sharding_plan.num_devices
    return Plan(
        num_workers=ranks, degrees=Degrees(data=ranks, tensor=ranks), device=device,  # type: ignore[arg-type]
        device_type=cluster.device, memory=estimate, predicted=TimeEstimate(module_s=sharding_plan.step_s),
        tokens_per_step=rows, num_steps=spec.train.num_steps, reasons=(), made_for=made_for(spec, cluster),
        money=estimate_money(cluster.price_per_hour, billed_devices=cluster.billed_devices(ranks),
                       step_s=sharding_plan.step_s, tokens_per_step=rows, num_steps=spec.train.num_steps),
        module=ModuleLayout(mesh=sharding_plan.mesh, plan=sharding_plan.to_json(), explained=sharding_plan.explain()),
    )  # fmt: skip
