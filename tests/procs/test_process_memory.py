"""By how much real processes grow while they work on a micro-batch, beside what is predicted."""

from pathlib import Path
from typing import Any

import pytest

from moe.plan import Cluster, LayoutSearch, Plan
from moe.plan.candidate import Candidate, Options
from moe.plan.degrees import Degrees
from moe.spec import JobSpec
from tests.grid import every
from tests.parity.gloo_ranks import many_with_torch
from tests.processes import DEADLINE_S
from tests.procs import memory_growth
from tests.unit.test_predicted_memory import MODELS

TRANSLATION = [name for name, given in MODELS.items() if "preset" in given]
"""Models of pairs, which `memory_growth` makes batches for."""

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
    context = many_with_torch()
    ours, theirs = context.Pipe()
    given = (spec, plan)
    ranks = [
        context.Process(target=memory_growth.main, args=(*given, rank, str(folder / "rendezvous"), theirs))
        for rank in range(plan.num_workers)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        said = []
        for _ in ranks:
            assert ours.poll(DEADLINE_S), "a rank hangs"
            said.append(int(ours.recv()))
    finally:
        for rank in ranks:
            rank.join(5)
            rank.kill()
            rank.join()
    return max(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    every(
        [
            *((name, "one process", "none") for name in TRANSLATION),
            *((name, "one process", "full") for name in TRANSLATION[:3]),
            *((next(iter(MODELS)), layout, "none") for layout in list(LAYOUTS)[1:]),
            (next(iter(MODELS)), "experts on two", "full"),
        ],
        3,
    ),
)
def test_processes_grow_as_predicted(case: tuple[str, str, Any], tmp_path: Path) -> None:
    """Within 15%."""
    name, layout, recompute = case
    degrees = LAYOUTS[layout]
    spec = job(MODELS[name], degrees.num_workers, "float32")
    cluster = Cluster(num_nodes=1, devices_per_node=degrees.num_workers, device="cpu", memory_bytes=1 << 40)
    plan = LayoutSearch(spec, cluster).plan_of(
        Candidate(degrees, Options(micro_batch_groups=GROUPS, recompute=recompute))
    )
    memory = plan.memory
    predicted = memory.activations + memory.dispatch + memory.workspace + memory.logits
    seen = measured(spec, plan, tmp_path)
    print(
        f"{name}, {layout}, recompute {recompute}: {seen / 2**20:.1f} MiB grown, {predicted / 2**20:.1f} predicted "
        f"({predicted / seen - 1:+.0%})"
    )
    assert predicted == pytest.approx(seen, rel=0.15)
