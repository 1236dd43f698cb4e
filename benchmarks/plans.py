"""Plans of the demo's model on this machine's CPU with 1, 2 and 4 workers, the best ones and those of two pipeline
stages and of two context ranks: predicted and measured seconds of a step.

Predictions use rates that `shardyard calibrate` measures on this machine, again for each number of workers: a shared
machine may be a third slower some minutes later. Gloo processes of one thread each run the plans in turns, in many
rounds of a few steps. The fastest round counts, as calibration counts its fastest measurement: neither includes load
from other processes. The median is printed as well.
"""

import os
import statistics
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "translate-100-to-english.yaml"
WORKERS, NUM_PLANS, ROUNDS, STEPS = (1, 2, 4), 3, 30, 3
TIE = 0.02
REQUESTED: tuple[dict[str, int], ...] = ({"pipeline": 2}, {"context": 2})
"""Layouts on two workers or more beside the best ones."""


def spec_for(num_workers: int, **parallel: int) -> Any:
    from moe.spec import ParallelSpec, ResourcesSpec, read_job

    spec = read_job(EXAMPLE)
    groups = max(2, num_workers)  # one per worker, and at least as many as in the demo
    changes = {
        "resources": ResourcesSpec(num_workers=num_workers),
        "parallel": ParallelSpec.model_validate(parallel),
        "train": spec.train.model_copy(update={"batch_tokens": groups * spec.group_tokens}),
    }
    return spec.model_copy(update=changes)


def run(rank: int, num_workers: int, plans: list[str], rendezvous: str, cache: str) -> list[list[float]]:
    """Seconds of a step by plan and round."""
    import torch
    import torch.distributed as dist

    from moe.calibrate.trial import step_seconds
    from moe.plan import Plan
    from moe.tasks.build import build_task

    torch.set_num_threads(1)
    spec = spec_for(num_workers)
    if num_workers > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_workers)
    task = build_task(spec)
    data = task.prepare(cache)
    seconds_by_plan: list[list[float]] = [[] for _ in plans]
    for _ in range(ROUNDS):
        for index, text in enumerate(plans):
            plan = Plan.model_validate_json(text)
            seconds_by_plan[index].append(
                step_seconds(task, plan, "cpu", data=data, storage=str(Path(rendezvous).parent / "run"),
                             cache=Path(cache), num_steps=STEPS, num_warm_up=3)
            )  # fmt: skip
    if num_workers > 1:
        dist.barrier()
        dist.destroy_process_group()
    return seconds_by_plan


def measure(num_workers: int, plans: list[Any], cache: str) -> list[list[float]]:
    """Seconds of a step by plan and round, from new processes."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from moe.train.environment import KEEP_FREED_MEMORY

    os.environ |= {"OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(num_workers, spawn) as workers:
        texts = [plan.model_dump_json() for plan in plans]
        ranks = [
            workers.submit(run, rank, num_workers, texts, f"{folder}/rendezvous", cache) for rank in range(num_workers)
        ]
        rounds, *_ = [rank.result() for rank in ranks]
    return rounds


def main(num_plans: int = NUM_PLANS) -> None:
    from benchmarks import results
    from moe.calibrate.rates import load_or_measure
    from moe.plan import Cluster
    from moe.plan.search.explain import layout_of
    from moe.plan.search.search import LayoutSearch
    from service.settings import Settings

    cache = str(Settings().cache_dir)
    figures = []
    for num_workers in WORKERS:
        spec, calibration = spec_for(num_workers), load_or_measure(Path(cache), refresh=True)
        print(calibration)
        cluster = Cluster(num_nodes=1, devices_per_node=num_workers, device="cpu", calibration=calibration)
        plans = LayoutSearch(spec, cluster).best_to_run(num_workers, num_plans)
        for parallel in REQUESTED if num_workers > 1 else ():
            plans += LayoutSearch(spec_for(num_workers, **parallel), cluster).best_to_run(num_workers, 1)
        plans.sort(key=lambda plan: plan.predicted.step_s)
        rounds = measure(num_workers, plans, cache)
        fastest_s = [min(plan_rounds) for plan_rounds in rounds]
        for plan, of_rounds in zip(plans, rounds, strict=True):
            seconds, median = min(of_rounds), statistics.median(of_rounds)
            layout = ", ".join(f"{name} {value}" for name, value in layout_of(plan).items())
            predicted_s = plan.predicted.step_s
            print(f"{num_workers} worker(s): {layout:<75} predicted {1e3 * predicted_s:7.1f} ms, "
                  f"measured {1e3 * seconds:7.1f} ms ({seconds / predicted_s - 1:+.0%}), "
                  f"median {1e3 * median:7.1f} ms ({median / predicted_s - 1:+.0%})")  # fmt: skip
            figures.append(
                {
                    "num_workers": num_workers,
                    "calibrated_gflops_per_s": round(calibration.flops_per_s["float32"] / 1e9, 1),
                    "layout": layout_of(plan),
                    "predicted_ms": round(1e3 * predicted_s, 2),
                    "measured_ms": round(1e3 * seconds, 2),
                    "median_ms": round(1e3 * median, 2),
                }
            )
        wrong = [
            f"{first + 1} and {second + 1}"
            for first, second in combinations(range(len(plans)), 2)
            if plans[second].predicted.step_s > (1 + TIE) * plans[first].predicted.step_s
            and fastest_s[second] < fastest_s[first]
        ]
        verdict = f"wrong of {', '.join(wrong)}" if wrong else f"right; within {TIE:.0%} is a tie"
        print(f"{num_workers} worker(s): the order is {verdict}")
    print(f"written to {results.write('plans', figures)}")


if __name__ == "__main__":
    main()
