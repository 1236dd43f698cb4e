"""Trial runs: a few training steps under a plan to measure its step time; no results are kept."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe.parallel import Layout, json_collectives
from moe.parallel.accelerator import accelerator
from moe.plan import Plan, Trial
from moe.plan.search.explain import layout_of
from moe.storage.folder import Folder
from moe.tasks.task import PreparedData, Task
from moe.train import expert_costs
from moe.train.batches import BatchPrefetcher
from moe.train.signals import Signals
from moe.train.step import step as take_step
from moe.train.train_state import TrainState

STEPS, WARM_UP_STEPS = 5, 2


def step_seconds(
    task: Task[Any, Any],
    plan: Plan,
    device: torch.device | str,
    *,
    data: PreparedData,
    storage: str,
    cache: Path,
    num_steps: int = STEPS,
    num_warm_up: int = WARM_UP_STEPS,
) -> float:
    """Seconds per step under `plan` on the slowest rank: mean of `num_steps` after `num_warm_up`, from new weights.

    Collective. `storage` and `cache` are a run's, for measured expert costs.
    """
    layout = Layout.build(plan, device)
    state = TrainState.build(task, layout)
    layers = state.moe_layers.local_layers.values()
    expert_costs.decide(layers, layout.device, state.dtype, Folder.of_job(storage), cache / "experts")
    state.shard_masters()
    batches = BatchPrefetcher(task.batches(data, plan, layout))
    try:
        began = time.perf_counter()
        for step in range(num_warm_up + num_steps):
            if step == num_warm_up:
                accelerator(layout.device).synchronize()
                began = time.perf_counter()
            take_step(state, batches.take(step), Signals())
        accelerator(layout.device).synchronize()
        local_step_s = (time.perf_counter() - began) / num_steps
    finally:
        batches.close()
    slowest = max(json_collectives.all_gather_json(local_step_s))
    layout.close()
    return slowest


def fastest(plans: Sequence[Plan], seconds: Sequence[float]) -> Plan:
    """Plan with the shortest measured step, the first on ties, with all trials recorded in it."""
    trials = tuple(
        Trial(layout=layout_of(plan), predicted_step_s=plan.predicted.step_s, measured_step_s=step_s)
        for plan, step_s in zip(plans, seconds, strict=True)
    )
    best = min(range(len(plans)), key=lambda index: seconds[index])
    reason = f"the fastest of {len(plans)} that were run for {STEPS} steps each: {1e3 * seconds[best]:.3g} ms a step"
    return plans[best].model_copy(update={"tried": trials, "reasons": (reason, *plans[best].reasons)})
