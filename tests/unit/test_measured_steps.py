"""Predictions beside our own steps on a GPU, and beside the kernels of the machines that others' steps ran on."""

import math

import pytest

from benchmarks.measured_steps import OLMOE_STEP_S, STEPS, MeasuredStep, olmoe_plan
from benchmarks.published_kernels import share_of
from moe.plan import Cluster, plan_job
from moe.plan.software import SOFTWARE, find_software
from tests.unit.test_verdict import language_job


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.num_micro_batches} micro-batches")
def test_our_own_step_is_predicted_as_it_was_measured(step: MeasuredStep) -> None:
    """By constants from another shape's software it was predicted 1.75 times as fast, outside of both ends."""
    plan = step.plan()
    assert abs(step.error()) < 0.08
    assert plan.memory.job_bytes / 2**30 == pytest.approx(step.measured_gib, rel=0.03)
    assert plan.ends_s[0] < step.measured_ms / 1000 < plan.ends_s[1]


def test_another_eager_trainers_step_is_predicted_within_both_ends() -> None:
    """OLMoE, on other devices and of another shape than the constants rest on."""
    plan = olmoe_plan()
    assert plan.ends_s[0] < OLMOE_STEP_S < plan.ends_s[1]
    assert plan.predicted.step_s == pytest.approx(OLMOE_STEP_S, rel=0.2)


@pytest.mark.parametrize("device", ["b200", "a100-80"])
def test_plain_megatron_sustains_what_the_kernels_of_its_machine_reach(device: str) -> None:
    """0.66 is of one B200, and no property of the software: on A100 that was 0.33 off in ln."""
    assert find_software("megatron-plain", "peer", None, device).host.sustained == pytest.approx(
        share_of(device), abs=0.02
    )


def test_where_no_kernels_were_measured_the_share_lies_between() -> None:
    plain = SOFTWARE["megatron-plain"]
    assert not plain.on("b200").extremes
    first, second = plain.on("h200").extremes
    assert first.host.sustained > plain.host.sustained > second.host.sustained


def test_gradients_are_clipped_and_weights_narrowed_once_a_step() -> None:
    """Each number of 4 bytes in AdamW's 28, 12 for clipping and 6 for the narrow copy."""
    spec = language_job("olmoe-1b-7b", 1)
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="h200", memory_bytes=2**40)
    with_clip = plan_job(spec, cluster, top=1).predicted.optimizer_s
    train = spec.train.model_copy(update={"clip_norm": None})
    without_clip = plan_job(spec.model_copy(update={"train": train}), cluster, top=1).predicted.optimizer_s
    assert math.isclose(with_clip / without_clip, (28 + 12 + 6) / (28 + 6), rel_tol=1e-3)
