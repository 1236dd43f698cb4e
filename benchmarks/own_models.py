"""Our own models in two layouts: the planner's choice for a job, and the plan of `moe.sharding` for the plain module
without hints. Both cost models price both layouts.

`moe.sharding` prices the planner's layout with hints on every parameter; the planner prices the other at the degrees
that split most bytes of its parameters.
"""

import math
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from benchmarks import results
from benchmarks.translation_loss import TranslationLoss
from moe import sharding
from moe.plan import Cluster, Degrees, Plan, plan_job
from moe.sharding import ShardingPlan
from moe.sharding.hints.hints import Hint
from moe.spec import JobSpec, SpecError

LIMIT = 1.05
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # preset, batch tokens, cluster
    "2 x cpu": ("gshard-tiny", 1 << 10, {"num_nodes": 1, "devices_per_node": 2}),
    "8 x cpu": ("gshard-tiny", 1 << 13, {"num_nodes": 1, "devices_per_node": 8}),
    "8 x h100": ("gshard-128e-12l", 1 << 17, {"num_nodes": 1, "devices_per_node": 8, "device": "h100"}),
    "64 x h100": ("gshard-128e-12l", 1 << 20, {"num_nodes": 8, "devices_per_node": 8, "device": "h100"}),
    "128 x h100": ("gshard-512e-12l", 1 << 21, {"num_nodes": 16, "devices_per_node": 8, "device": "h100"}),
}


def job(preset: str, batch_tokens: int, num_workers: int, parallel: dict[str, int] | None = None) -> JobSpec:
    """Job without pipelines and context ranks, which the program does not have."""
    return JobSpec.parse({
        "model": {"preset": preset}, "data": {"corpus": "catalogs"},
        "train": {"num_steps": 1, "batch_tokens": batch_tokens, "dtype": "float32", "optimizer": {"name": "adamw"}},
        "parallel": {"pipeline": 1, "context": 1, **(parallel or {})}, "resources": {"num_workers": num_workers},
    })  # fmt: skip


def sample_of(spec: JobSpec) -> tuple[Tensor, ...]:
    """A batch of rows about as long as the job's data."""
    length = 1 << math.ceil(math.log2(spec.data.padded_tokens))
    shape = (spec.train.batch_tokens // spec.model.sides // length, length)
    source, target_in, target_out = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3))
    return source, target_in, target_out, torch.tensor(0)


def pins_of(plan: Plan) -> tuple[dict[str, int], dict[str, Hint]]:
    """(mesh, hints that place every parameter like the planner's plan)."""
    degrees, total = plan.degrees, plan.num_workers
    inner = degrees.expert * degrees.expert_tensor
    mesh = {"outer": total // inner, "inner": inner} if 1 < inner < total else {"devices": total}

    def axes(name: str) -> tuple[str, ...]:
        degree = getattr(degrees, name)
        if degree == total:
            return tuple(mesh)
        return ("outer",) if name == "expert_fsdp" else ("inner",)

    hints: dict[str, Hint] = {"inputs": sharding.Split(0)}
    for placement in plan.placements or ():
        dim_by_axis = {axis: dim for name, dim in placement.effective_splits(vars(degrees)) for axis in axes(name)}
        hints[f"model.{placement.parameter}"] = sharding.Shard(dim_by_axis) if dim_by_axis else sharding.Replicate()
    return mesh, hints


def degrees_of(plan: ShardingPlan) -> tuple[int, dict[str, int]]:
    """(workers, degrees for `parallel`) that split most bytes of a program's plan. An axis that leaves most operators
    whole does not count: all its ranks do the same work."""
    gathers = {(collective.tensor, collective.axis) for collective in plan.collectives if collective.kind == "gather"}
    numel = {tensor.name: math.prod(tensor.shape) for tensor in plan.stored}
    bytes_by_axis: Counter[str] = Counter()
    workers = 1
    for index, (axis, degree) in enumerate(plan.mesh.items()):
        axis_options = [names[index] for names in plan.options.values()]
        if axis_options.count("whole") > len(axis_options) / 2:
            continue
        workers *= degree
        for experts in (False, True):
            kinds: Counter[str] = Counter()
            for name, placements in plan.parameters.items():
                if (".experts." in name) == experts:
                    kind = _kind(placements.split()[index], (name, axis) in gathers, experts)
                    kinds[kind] += numel[name]
            if kinds:
                bytes_by_axis[kinds.most_common(1)[0][0]] += degree.bit_length() - 1
    return workers, {name: 1 << doublings for name, doublings in bytes_by_axis.items() if name}


def _kind(placement: str, is_gathered: bool, experts: bool) -> str:
    """Axis of a planner's plan with this placement of a parameter; empty if the parameter is whole."""
    if placement == "R":
        return ""
    if is_gathered:
        return "expert_fsdp" if experts else "fsdp"
    if not experts:
        return "tensor"
    return "expert" if placement == "S(0)" else "expert_tensor"


def compare(name: str) -> dict[str, Any]:
    preset, batch_tokens, parts = CASES[name]
    cluster = Cluster.model_validate(parts)
    spec = job(preset, batch_tokens, cluster.num_devices)
    job_plan, module, sample = plan_job(spec, cluster), TranslationLoss.on_meta(spec.model), sample_of(spec)
    began = time.perf_counter()
    free_plan = sharding.plan(module, sample, cluster)
    seconds = time.perf_counter() - began
    mesh, hints = pins_of(job_plan)
    pinned_plan = sharding.plan(module, sample, cluster, hints, mesh=mesh)
    workers, parallel = degrees_of(free_plan)
    try:
        axes = {axis: 1 for axis in vars(Degrees()) if axis not in ("data", "pipeline", "context")}
        engine_plan = plan_job(job(preset, batch_tokens, workers, {**axes, **parallel}), cluster)
    except SpecError:
        engine_plan = None
    return {
        "on": name, "model": preset, "batch_tokens": batch_tokens,
        "planner": f"{job_plan.degrees}", "planner_step_s": job_plan.predicted.step_s,
        "planner_choice_by_program_s": round(pinned_plan.step_s, 6),
        "program": f"{engine_plan.degrees}" if engine_plan else f"{workers} workers, {parallel}",
        "program_by_planner_s": engine_plan.predicted.step_s if engine_plan else None,
        "program_step_s": round(free_plan.step_s, 6),
        "ratio_by_program": round(free_plan.step_s / pinned_plan.step_s, 3),
        "ratio_by_planner": round(engine_plan.predicted.step_s / job_plan.predicted.step_s, 3) if engine_plan else None,
        "seconds_to_plan": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    figures = []
    for name in CASES:
        figures.append(comparison := compare(name))
        print(", ".join(f"{key} {value}" for key, value in comparison.items()), flush=True)
    print(f"limit of both ratios: {LIMIT}; written to {results.write('own_models', figures)}")


if __name__ == "__main__":
    main()
