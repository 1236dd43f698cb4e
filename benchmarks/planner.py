"""Time and memory of the planner's search for the largest jobs that have presets, on one core."""

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import results
from moe.plan import DEVICES as KNOWN
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, SpecError

LANGUAGE = {"corpus": "synthetic", "max_tokens": 4096}
LONG = {"corpus": "synthetic", "max_tokens": 1 << 20}


@dataclass(frozen=True)
class Job:
    """A preset, possibly changed, on a number of GPUs."""

    model: dict[str, Any]
    data: dict[str, Any]
    batch_tokens: int
    devices: int


_DEEPSEEK = {"preset": "deepseek-v3"}
JOBS = {
    "deepseek-v3 on 1,024": Job(_DEEPSEEK, LANGUAGE, 8192 * 4096, 1024),
    "gshard-2048e-36l on 2,048": Job({"preset": "gshard-2048e-36l"}, {"corpus": "catalogs"}, 1 << 22, 2048),
    "deepseek-v3 on 98,304": Job(_DEEPSEEK, LANGUAGE, 98_304 * 4096, 98_304),
    "sequences of a million tokens on 2,048": Job(
        {**_DEEPSEEK, "moe": {"group_tokens": 1 << 20}}, LONG, 64 << 20, 2048
    ),
    "10,240 experts on 1,024, refused": Job({**_DEEPSEEK, "moe": {"num_experts": 10_240}}, LANGUAGE, 8192 * 4096, 1024),
    "10,240 experts on 8,192": Job({**_DEEPSEEK, "moe": {"num_experts": 10_240}}, LANGUAGE, 8192 * 4096, 8192),
}
DEVICES = (8, 64, 512, 4096, 16_384)
"""Numbers of devices on which mixtral-8x7b is planned at the degrees of 8 devices."""


def search(name: str) -> dict[str, Any]:
    """Seconds by the clock and of the processor, and peak memory of the process."""
    job = JOBS[name]
    spec = _job(job.model, job.data, job.batch_tokens, job.devices)
    began, processor_start = time.perf_counter(), time.process_time()
    try:
        plan_job(spec, _nodes(job.devices))
    except SpecError:
        if "refused" not in name:
            raise
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor_start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"search": name, "seconds": round(seconds, 2), "processor_s": round(processor_s, 2),
            "peak_mb": round(peak_mb)}  # fmt: skip


def time_growth() -> list[dict[str, Any]]:
    """Seconds of plans at fixed degrees, with the same batch per device and therefore the same number of choices."""
    rows = []
    for devices in DEVICES:
        parallel = {"expert": 8, "expert_tensor": 1, "tensor": 1, "context": 1, "pipeline": 1}
        spec = _job({"preset": "mixtral-8x7b"}, LANGUAGE, 8 * devices * 4096, devices, parallel)
        cluster = _nodes(devices, memory_gib=2000)
        times_s = []
        for _ in range(5):
            began = time.perf_counter()
            plan_job(spec, cluster)
            times_s.append(time.perf_counter() - began)
        rows.append({"search": f"mixtral-8x7b at fixed degrees on {devices:,}", "seconds": round(min(times_s), 4)})
    return rows


def _job(
    model: dict[str, Any], data: dict[str, Any], batch_tokens: int, devices: int, parallel: dict[str, int] | None = None
) -> JobSpec:
    train = {"num_steps": 1, "batch_tokens": batch_tokens, "dtype": "bfloat16"}
    return JobSpec.parse({"model": model, "data": data, "train": train, "parallel": parallel or {},
                          "resources": {"num_workers": devices}})  # fmt: skip


def _nodes(devices: int, memory_gib: int | None = None) -> Cluster:
    """Nodes of eight H100, with `memory_gib` per device if given."""
    memory_bytes = KNOWN["h100"].memory_bytes if memory_gib is None else memory_gib << 30
    return Cluster(num_nodes=devices // 8, devices_per_node=8, device="h100", memory_bytes=memory_bytes)


def main() -> None:
    if len(sys.argv) > 1:  # a separate process, whose memory is that of one search
        print(json.dumps(search(sys.argv[1])))
        return
    figures = []
    for name in JOBS:
        command = [sys.executable, "-m", "benchmarks.planner", name]
        figures.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    figures += time_growth()
    for row in figures:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    print(f"written to {results.write('planner', figures)}")


if __name__ == "__main__":
    main()
