"""A case in which the planner and `moe.sharding` choose differently, measured on two cores: the demo's model on two
ranks in the planner's layout (batch split, everything else replicated), and as planned by `moe.sharding` with a CPU's
default rates and with this machine's own (`moe.calibrate`). The layouts take turns in one run, as in `sharded_step`.
"""

import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import results, sharded_step
from benchmarks.sharded_step import RANKS, Step
from moe import sharding
from moe.calibrate.rates import measure_cpu
from moe.plan import Calibration, Cluster
from moe.train.environment import KEEP_FREED_MEMORY

PLANNER, BY_DEFAULT, CALIBRATED = "planner", "program", "program, calibrated"


def plans(calibration: Calibration) -> dict[str, sharding.ShardingPlan]:
    spec = sharded_step.job(RANKS)
    batch, module = sharded_step.batch(spec), sharded_step.plain(spec)
    replicate_hints = {name: sharding.Replicate() for name, _ in module.named_parameters()}
    default_cluster = sharded_step.cluster_of(RANKS)
    calibrated_cluster = Cluster.model_validate({**default_cluster.model_dump(), "calibration": calibration})

    def plan(cluster: Cluster, hints: dict[str, Any]) -> sharding.ShardingPlan:
        return sharding.plan(module, batch, cluster, hints, mesh={"devices": RANKS})

    return {
        PLANNER: plan(sharded_step.quick_links(RANKS), {"inputs": sharding.Split(0), **replicate_hints}),
        BY_DEFAULT: plan(default_cluster, {}),
        CALIBRATED: plan(calibrated_cluster, {}),
    }


def on_two(rank: int, folder: str, answer: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    spec, figures = sharded_step.job(RANKS), {}
    names = (PLANNER, BY_DEFAULT, CALIBRATED)
    plans_by_name = {name: sharding.ShardingPlan.load(f"{folder}/{name}.json") for name in names}
    for program_name in (BY_DEFAULT, CALIBRATED):
        applied_modules: list[sharding.Applied] = []
        steps: dict[str, Step] = {}
        for name in (PLANNER, program_name):
            batch = sharded_step.batch(spec)
            applied_modules.append(sharding.apply(sharded_step.plain(spec), plans_by_name[name], sample=batch))
            steps[name] = sharded_step.training_step(applied_modules[-1], spec)
        losses = {name: [step() for _ in range(sharded_step.WARM_UP)] for name, step in steps.items()}
        figures[program_name] = {
            "losses": losses,
            **sharded_step.turns(steps),
            "predicted_s": plans_by_name[program_name].step_s,
        }
        for program in applied_modules:
            sharding.close(program)
    if rank == 0:
        answer.send(figures)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    calibration = measure_cpu()
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in plans(calibration).items():
            plan.save(f"{folder}/{name}.json")
        results_by_name = sharded_step.run_ranks(on_two, RANKS, folder)
    for name, row in results_by_name.items():
        print(f"{name}: {row[name]['median_ms']:.1f} ms a step, {row['ratio']:.3f} times the planner's, "
              f"of processor time {row['ratio_of_processor']:.3f}")  # fmt: skip
    figures = {"latency_s": calibration.latency_s, **results_by_name}
    print(f"a collective takes {1e3 * (calibration.latency_s or 0):.2f} ms at least here; "
          f"written to {results.write('two_layouts', figures)}")  # fmt: skip


if __name__ == "__main__":
    main()
