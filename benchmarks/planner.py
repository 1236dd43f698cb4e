"""How long the planner searches, and in how much memory: the largest jobs that it has presets for, on one core."""

import json
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks import results
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec

LANGUAGE = {"corpus": "synthetic", "max_tokens": 4096}
JOBS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    # preset, data, batch tokens, GPUs
    "deepseek-v3": ("deepseek-v3", LANGUAGE, 8192 * 4096, 1024),
    "gshard-2048e-36l": ("gshard-2048e-36l", {"corpus": "catalogs"}, 1 << 22, 2048),
}
DEVICES = (8, 64, 512, 4096, 16_384)
"""Over which mixtral-8x7b is planned at the same degrees: those that 8 devices have."""


def search(name: str) -> dict[str, Any]:
    preset, data, batch_tokens, devices = JOBS[name]
    spec = _job(preset, data, batch_tokens, devices)
    began = time.perf_counter()
    plan_job(spec, _h100s(devices))
    seconds = time.perf_counter() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"search": f"{name} on {devices:,}", "seconds": round(seconds, 2), "peak_mb": round(peak_mb)}


def grown() -> list[dict[str, Any]]:
    """Seconds of a plan at degrees that the job names, with as large a share of the batch for each device: of as many
    choices."""
    found = []
    for devices in DEVICES:
        parallel = {"expert": 8, "expert_tensor": 1, "tensor": 1, "context": 1, "pipeline": 1}
        spec = _job("mixtral-8x7b", LANGUAGE, 8 * devices * 4096, devices, parallel)
        cluster = _h100s(devices, memory_gib=2000)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            plan_job(spec, cluster)
            taken.append(time.perf_counter() - began)
        found.append(
            {"search": f"mixtral-8x7b at fixed degrees on {devices:,}", "seconds": round(min(taken), 4)}
        )
    return found


def _job(
    preset: str, data: dict[str, Any], batch_tokens: int, devices: int, parallel: dict[str, int] | None = None
) -> JobSpec:
    train = {"num_steps": 1, "batch_tokens": batch_tokens, "dtype": "bfloat16"}
    return JobSpec.parse({"model": {"preset": preset}, "data": data, "train": train, "parallel": parallel or {},
                          "resources": {"num_workers": devices}})  # fmt: skip


def _h100s(devices: int, memory_gib: int = 80) -> Cluster:
    return Cluster(num_nodes=devices // 8, devices_per_node=8, device="h100", memory_bytes=memory_gib << 30)


def main() -> None:
    if len(sys.argv) > 1:  # a process of its own, whose memory is that of one search
        print(json.dumps(search(sys.argv[1])))
        return
    figures = []
    for name in JOBS:
        command = [sys.executable, "-m", "benchmarks.planner", name]
        figures.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    figures += grown()
    for each in figures:
        print(", ".join(f"{name} {value}" for name, value in each.items()))
    print(f"written to {results.write('planner', figures)}")


if __name__ == "__main__":
    main()
