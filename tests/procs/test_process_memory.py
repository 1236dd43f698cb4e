"""By how much real processes grow while they work on a micro-batch, beside what is predicted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe.plan import Cluster, Plan, Search
from moe.plan.candidate import Candidate
from moe.plan.degrees import Degrees
from moe.spec import JobSpec
from tests.processes import DEADLINE_S
from tests.unit.test_predicted_memory import MODELS

LENGTH, GROUPS = 64, 8
LAYOUTS = {
    "one process": Degrees(),
    "experts on two": Degrees(expert=2),
    "experts split over two": Degrees(expert_tensor=2),
    "heads and experts over two": Degrees(tensor=2, expert=2),
    "replicas on two": Degrees(data=2),
}


def job(model: dict[str, Any], workers: int, dtype: str) -> JobSpec:
    group = model.get("moe", {}).get("group_tokens", 512)
    if "dense" not in model["preset"] and "router" not in model.get("moe", {}):
        every = {"second_expert": "all", "capacity_factor": 8.0}  # no choice is dropped
        model = {**model, "moe": {**model.get("moe", {}), **every}}
    return JobSpec.parse(
        {
            "model": model,
            "data": {"corpus": "catalogs", "max_tokens": LENGTH},
            "train": {"num_steps": 1, "batch_tokens": GROUPS * workers * group, "dtype": dtype},
            "resources": {"num_workers": workers},
        }
    )


def measured(spec: JobSpec, plan: Plan, folder: Path) -> int:
    """The most that a rank's process grows."""
    # Blocks go back when they are freed: otherwise a process keeps what a peak took, and does not grow again.
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.procs.memory_growth", spec.model_dump_json(), plan.model_dump_json(),
             str(rank), str(folder / "rendezvous")],
            stdout=subprocess.PIPE, text=True, env=given,
        )
        for rank in range(plan.num_workers)
    ]  # fmt: skip
    said = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return max(int(json.loads(text)["growth"]) for text in said)


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        *((name, "one process", "none") for name in MODELS),
        *((name, "one process", "full") for name in list(MODELS)[:3]),
        *((next(iter(MODELS)), layout, "none") for layout in list(LAYOUTS)[1:]),
        (next(iter(MODELS)), "experts on two", "full"),
    ],
)
def test_processes_grow_as_predicted(name: str, layout: str, recompute: Any, tmp_path: Path) -> None:
    """Within 15%."""
    degrees = LAYOUTS[layout]
    spec = job(MODELS[name], degrees.num_workers, "float32")
    cluster = Cluster(num_nodes=1, devices_per_node=degrees.num_workers, device="cpu", memory_bytes=1 << 40)
    plan = Search(spec, cluster).plan_of(Candidate(degrees, GROUPS, 1, recompute=recompute))
    memory = plan.memory
    predicted = memory.activations + memory.dispatch + memory.workspace + memory.logits
    seen = measured(spec, plan, tmp_path)
    print(
        f"{name}, {layout}, recompute {recompute}: {seen / 2**20:.1f} MiB grown, {predicted / 2**20:.1f} predicted "
        f"({predicted / seen - 1:+.0%})"
    )
    assert predicted == pytest.approx(seen, rel=0.15)
