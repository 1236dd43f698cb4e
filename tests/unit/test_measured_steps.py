"""Predictions compared with our own steps on a GPU, and with kernels of the machines that ran other published steps."""

import math

import pytest

from benchmarks.measured_steps import OLMOE_STEP_S, STEPS, MeasuredStep, olmoe_plan
from benchmarks.published_kernels import share_of
from moe.plan import Cluster, plan_job
from moe.plan.software import SOFTWARE, find_software
from tests.unit.test_verdict import language_job


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.num_micro_batches} micro-batches")
def test_our_own_step_is_predicted_as_it_was_measured(step: MeasuredStep) -> None:
    """With constants from another shape's software the prediction was 1.75 times as fast, outside both ends."""
    plan = step.plan()
    assert abs(step.error()) < 0.08
    assert plan.memory.job_bytes / 2**30 == pytest.approx(step.measured_gib, rel=0.03)
    assert plan.ends_s[0] < step.measured_ms / 1000 < plan.ends_s[1]


def test_another_eager_trainers_step_is_predicted_within_both_ends() -> None:
    """OLMoE, on other devices and in another shape than the constants are based on."""
    plan = olmoe_plan()
    assert plan.ends_s[0] < OLMOE_STEP_S < plan.ends_s[1]
    assert plan.predicted.step_s == pytest.approx(OLMOE_STEP_S, rel=0.2)


@pytest.mark.parametrize("device", ["b200", "a100-80"])
def test_plain_megatron_sustains_what_the_kernels_of_its_machine_reach(device: str) -> None:
    """The constant 0.66 belongs to one B200, not to the software: on A100 it was off by 0.33 in ln."""
    assert find_software("megatron-plain", "peer", None, device).host.sustained == pytest.approx(
        share_of(device), abs=0.02
    )


def test_where_no_kernels_were_measured_the_share_lies_between() -> None:
    plain = SOFTWARE["megatron-plain"]
    assert not plain.for_device("b200").extremes
    first, second = plain.for_device("h200").extremes
    assert first.host.sustained > plain.host.sustained > second.host.sustained


def test_gradients_are_clipped_and_weights_narrowed_once_a_step() -> None:
    """Per 4-byte number, AdamW moves 28 bytes, clipping 12 and the narrow copy 6."""
    spec = language_job("olmoe-1b-7b", 1)
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="h200", memory_bytes=2**40)
    with_clip = plan_job(spec, cluster, top=1).predicted.optimizer_s
    train = spec.train.model_copy(update={"clip_norm": None})
    without_clip = plan_job(spec.model_copy(update={"train": train}), cluster, top=1).predicted.optimizer_s
    assert math.isclose(with_clip / without_clip, (28 + 12 + 6) / (28 + 6), rel_tol=1e-3)
