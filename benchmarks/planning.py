"""Seconds that `moe.sharding` plans our translation model as a plain module, on clusters of 8 to 2,048 devices; experts
and batch grow with the devices as in the GShard paper. Also the memory to plan the paper's model of 10^12 parameters.

The model has one block of each kind (encoder and decoder, without and with experts) with embeddings and loss: deeper
models repeat these blocks, and repeated blocks are planned once. Each round is a separate process that first plans for
four devices, then for the clusters, in a different order each round. Limits: at 2,048 devices 1.5 times the seconds at
8; 10 s on one mesh axis and 60 s on two; 2 GB. `python -m benchmarks.planning time` or `memory` measures one of them.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks import results
from benchmarks.translation_loss import TranslationLoss
from moe import sharding
from moe.plan import Cluster
from moe.spec import TranslationModelSpec

DEVICES = (8, 16, 64, 128, 512, 2048)
ROUNDS = {1: 5, 2: 3}
"""Rounds by number of mesh axes."""
LIMIT_S = {1: 10.0, 2: 60.0}
LIMIT_GROWTH, LIMIT_BYTES = 1.5, 2e9

BLOCK, LARGEST = "gshard-128e-12l", "gshard-2048e-60l"
LENGTH, ROWS_A_DEVICE = 512, 2
"""Tokens of a row on each side, and rows per device: 2,048 tokens per device, the paper's 4 M on 2,048 devices."""


def model_for(devices: int) -> TranslationLoss:
    """One block of each kind, with as many experts as devices, without weights."""
    model = {
        "preset": BLOCK, "num_encoder_layers": 2, "num_decoder_layers": 2, "moe": {"num_experts": devices},
    }  # fmt: skip
    return TranslationLoss.on_meta(TranslationModelSpec.model_validate(model))


def batch_for(devices: int) -> tuple[torch.Tensor, ...]:
    rows = torch.empty((ROWS_A_DEVICE * devices, LENGTH), dtype=torch.int64, device="meta")
    return rows, rows, rows, torch.empty((), dtype=torch.int64, device="meta")


def h100s(devices: int) -> Cluster:
    return Cluster(num_nodes=max(1, devices // 8), devices_per_node=min(8, devices), device="h100")


def mesh_of(devices: int, axes: int) -> dict[str, int]:
    """Mesh of one or two axes; the inner one of two is a node, or half of a single node."""
    inner = min(8, devices // 2)
    return {"devices": devices} if axes == 1 else {"outer": devices // inner, "inner": inner}


def seconds(devices: int, axes: int) -> dict[str, Any]:
    """Seconds of one plan, by the clock and of the processor, without building the model."""
    model, batch = model_for(devices), batch_for(devices)
    began, processor_start = time.perf_counter(), time.process_time()
    plan = sharding.plan(model, batch, h100s(devices), mesh=mesh_of(devices, axes))
    times = {"seconds": time.perf_counter() - began, "processor_s": time.process_time() - processor_start}
    experts = {placement for name, placement in plan.parameters.items() if name.endswith("experts.w_in")}
    return {"devices": devices, **times, "experts": sorted(experts), "step_ms": 1e3 * plan.step_s}


def one_round(axes: int, number: int) -> list[dict[str, Any]]:
    """Figures of a plan for each cluster."""
    seconds(4, axes)
    first = number * len(DEVICES) // ROUNDS[axes]
    return [seconds(devices, axes) for devices in DEVICES[first:] + DEVICES[:first]]


def largest() -> dict[str, Any]:
    """Plan of the model with 10^12 parameters over all meshes that the planner considers."""
    spec = TranslationModelSpec.model_validate({"preset": LARGEST})
    began = time.perf_counter()
    plan = sharding.plan(TranslationLoss.on_meta(spec), batch_for(2048), h100s(2048))
    return {
        "model": LARGEST,
        "parameters": spec.num_parameters(),
        "devices": 2048,
        "meshes": [candidate.mesh for candidate in plan.considered],
        "mesh": plan.mesh,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "limit_bytes": LIMIT_BYTES,
    }


def in_a_process(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.planning", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def growth(axes: int) -> dict[str, Any]:
    """Medians of the rounds, by devices."""
    rounds = [in_a_process("round", str(axes), str(number)) for number in range(ROUNDS[axes])]
    rows = []
    for devices in DEVICES:
        runs = [run for round_runs in rounds for run in round_runs if run["devices"] == devices]
        assert all(run["experts"] == runs[0]["experts"] for run in runs), runs
        rows.append(
            {
                "devices": devices,
                **{name: round(statistics.median(run[name] for run in runs), 2) for name in ("seconds", "processor_s")},
                "all_seconds": [round(run["seconds"], 2) for run in runs],
                "experts": runs[0]["experts"],
                "step_ms": round(runs[0]["step_ms"], 2),
            }
        )
    first, *_, last = rows
    return {
        "mesh_axes": axes,
        "rounds": ROUNDS[axes],
        "clusters": rows,
        "longest_s": max(row["seconds"] for row in rows),
        "limit_s": LIMIT_S[axes],
        "growth": round(last["seconds"] / first["seconds"], 3),
        "growth_of_processor_s": round(last["processor_s"] / first["processor_s"], 3),
        "limit_growth": LIMIT_GROWTH,
    }


def show(table: dict[str, Any]) -> None:
    """Print the table of one kind of mesh."""
    print(f"plans on {table['mesh_axes']} mesh axes, medians of {table['rounds']}")
    print(f"{'devices':>9}{'seconds':>10}{'processor':>11}   experts lie")
    for row in table["clusters"]:
        placements = " and ".join(row["experts"])
        print(f"{row['devices']:>9,}{row['seconds']:>10.2f}{row['processor_s']:>11.2f}   {placements}")
    print(f"longest {table['longest_s']:.2f} s (limit {table['limit_s']:g} s); at 2,048 {table['growth']:.2f} times "
          f"that at 8, of processor time {table['growth_of_processor_s']:.2f} (limit {LIMIT_GROWTH})")  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["round", axes, number]:
            print(json.dumps(one_round(int(axes), int(number))))
        case ["largest"]:
            print(json.dumps(largest()))
        case parts:
            if not parts or "time" in parts:
                figures = [growth(axes) for axes in ROUNDS]
                for growth_figures in figures:
                    show(growth_figures)
                print(f"written to {results.write('planning', figures)}")
            if not parts or "memory" in parts:
                largest_plan = in_a_process("largest")
                print(f"{largest_plan['parameters']:,} parameters planned for {largest_plan['devices']:,} devices in "
                      f"{largest_plan['seconds']:.0f} s, at most {largest_plan['peak_bytes'] / 1e9:.2f} GB "
                      f"(limit {LIMIT_BYTES / 1e9:g} GB)")  # fmt: skip
                print(f"written to {results.write('planning_memory', largest_plan)}")


if __name__ == "__main__":
    main()
