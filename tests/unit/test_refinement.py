"""Schedules, stage cuts and context exchanges that plans choose."""

from typing import Any

import pytest

from moe.plan import Cluster, Plan, plan_job
from moe.plan.candidate import EXCHANGES, SCHEDULES
from moe.spec import JobSpec, SpecError

H100 = Cluster(num_nodes=1, devices_per_node=8, device="h100")


def plan_of(
    parallel: dict[str, Any], *, max_tokens: int = 512, num_groups: int = 32, vocab_size: int = 100_000
) -> Plan:
    """Plan of a language model of eight layers on four workers."""
    spec = JobSpec.parse(
        {
            "model": {"kind": "language", "model_dim": 1024, "num_layers": 8, "ffn_dim": 4096, "vocab_size": vocab_size,
                      "attention": {"kind": "grouped_query", "num_heads": 16, "num_kv_heads": 8, "head_dim": 64}},
            "data": {"corpus": "packages", "max_tokens": max_tokens},
            "train": {"num_steps": 1, "batch_tokens": num_groups * max_tokens, "dtype": "bfloat16"},
            "resources": {"num_workers": 4},
            "parallel": parallel,
        }
    )  # fmt: skip
    return plan_job(spec, H100, 4, top=1)


def test_a_slow_head_has_fewer_layers_beside_it() -> None:
    parallel = {"pipeline": 4, "schedule": "1f1b"}
    plan = plan_of(parallel)
    stages = plan.options.stages
    assert stages is not None
    assert stages[-1] < max(stages)
    even = plan_of({**parallel, "stages": [2, 2, 2, 2]})
    assert plan.predicted.step_s < even.predicted.step_s


@pytest.mark.parametrize(("option", "values", "parallel", "max_tokens"), [
    ("schedule", SCHEDULES, {"pipeline": 4, "micro_batch_groups": 2}, 512),
    ("schedule", SCHEDULES, {"pipeline": 2, "virtual_stages": 2, "micro_batch_groups": 2}, 512),
    ("context_exchange", EXCHANGES, {"context": 4}, 16_384),
    ("context_exchange", EXCHANGES, {"context": 2, "pipeline": 2}, 16_384),
], ids=str)  # fmt: skip
def test_nothing_that_could_be_asked_for_is_faster(
    option: str, values: tuple[str, ...], parallel: dict[str, Any], max_tokens: int
) -> None:
    chosen = plan_of(parallel, max_tokens=max_tokens)
    steps_s = {}
    for value in values:
        try:
            steps_s[value] = plan_of({**parallel, option: value}, max_tokens=max_tokens).predicted.step_s
        except SpecError:  # a schedule without such virtual stages
            continue
    assert len(steps_s) > 1
    assert chosen.predicted.step_s <= min(steps_s.values()) * (1 + 1e-5)
    assert steps_s[getattr(chosen.options, option)] == pytest.approx(chosen.predicted.step_s)


def test_too_few_micro_batches_are_left_to_gpipe() -> None:
    assert plan_of({"pipeline": 4}, num_groups=2).options.schedule == "gpipe"
