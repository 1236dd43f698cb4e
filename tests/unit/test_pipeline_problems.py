"""Refusals of pipeline stages, schedules and context ranks that a job's model or workers do not allow."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.plan.executable import refusal
from moe.spec import JobSpec, ProblemCode
from moe.tasks.build import build_model
from tests.refusals import expect_problem

H100 = Cluster(num_nodes=1, devices_per_node=8, device="h100")


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        ({"stages": [2, 3]}, ("mismatch", "parallel.stages", "2+3")),
        ({"stages": [1, 1, 1, 1, 1]}, ("mismatch", "parallel.stages", "5x1")),
        ({"pipeline": 2, "stages": [2, 2], "schedule": "interleaved"}, ("mismatch", "parallel", None)),
        ({"pipeline": 2, "stages": [2, 2], "overlap": True}, ("mismatch", "parallel", None)),
        ({"stages": [2, 1, 1], "schedule": "interleaved"}, ("mismatch", "parallel", None)),
        ({"context": 3}, ("not_divisible", "parallel.context", 3)),
        ({"context": 8, "context_exchange": "heads"}, ("not_divisible", "model.attention.num_heads", 4)),
        ({"context": 2, "tensor": 4, "context_exchange": "heads"}, ("not_divisible", "model.attention.num_heads", 4)),
    ],
)
def test_stages_and_context_ranks_that_do_not_fit_the_model_are_refused(
    parallel: dict[str, Any], problem: tuple[ProblemCode, str, Any]
) -> None:
    with expect_problem(*problem):
        language_job(8, parallel)


@pytest.mark.parametrize(
    ("workers", "parallel", "problem"),
    [
        (5, {"pipeline": 5}, ("out_of_range", "parallel.pipeline", 5)),
        (2, {"pipeline": 2, "virtual_stages": 3}, ("out_of_range", "parallel.pipeline", 2)),
        (3, {"pipeline": 3, "schedule": "zb_v"}, ("out_of_range", "parallel.pipeline", 3)),
        (1, {"schedule": "gpipe"}, ("requires", "parallel.schedule", "gpipe")),
        (1, {"stages": [2, 2]}, ("requires", "parallel.stages", "2x2")),
        (3, {"stages": [2, 2]}, ("requires", "parallel.stages", "2x2")),
        (2, {"stages": [1, 1, 1, 1], "virtual_stages": 1}, ("requires", "parallel.stages", "4x1")),
        (1, {"virtual_stages": 2}, ("requires", "parallel.virtual_stages", 2)),
        (3, {"virtual_stages": 2}, ("out_of_range", "parallel.pipeline", 3)),
        (4, {"fsdp": 4, "schedule": "1f1b"}, ("requires", "parallel.schedule", "1f1b")),
        (1, {"context_exchange": "ring"}, ("requires", "parallel.context_exchange", "ring")),
        (2, {"pipeline": 2, "context_exchange": "ring"}, ("requires", "parallel.context_exchange", "ring")),
        (4, {"pipeline": 4, "schedule": "1f1b", "micro_batch_groups": 3},
         ("out_of_range", "parallel.schedule", "1f1b")),
        (2, {"pipeline": 2, "schedule": "zb_v", "micro_batch_groups": 8},
         ("out_of_range", "parallel.schedule", "zb_v")),
        (2, {"pipeline": 2, "virtual_stages": 2, "micro_batch_groups": 8},
         ("out_of_range", "parallel.schedule", "interleaved")),
    ],
)  # fmt: skip
def test_options_that_no_degrees_allow_are_refused(
    workers: int, parallel: dict[str, Any], problem: tuple[ProblemCode, str, Any]
) -> None:
    with expect_problem(*problem):
        plan_job(language_job(workers, parallel), H100, workers)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"schedule": "1f1b", "virtual_stages": 2}, ("conflict", "options", None)),
        ({"schedule": "interleaved"}, ("conflict", "options", None)),
        ({"schedule": "zb_v"}, ("conflict", "options", None)),
        ({"stages": (2, 1, 1)}, ("mismatch", "options.stages", "2+2x1")),
        ({"schedule": "1f1b", "num_micro_batches": 1}, ("out_of_range", "options.schedule", "1f1b")),
    ],
)
def test_options_of_a_plan_by_hand_are_refused(options: dict[str, Any], problem: tuple[ProblemCode, str, Any]) -> None:
    plan = plan_job(language_job(2, {"pipeline": 2}), H100, 2)
    assert refusal(plan) is None
    by_hand = refusal(plan.model_copy(update={"options": replace(plan.options, **options)}))
    assert by_hand is not None
    assert (by_hand.code, by_hand.path, by_hand.value) == problem


@pytest.mark.parametrize(
    ("degrees", "options", "problem"),
    [
        ({"pipeline": 5}, {}, ("out_of_range", "parallel.pipeline", 5)),
        ({"pipeline": 2}, {"virtual_stages": 3}, ("out_of_range", "parallel.pipeline", 2)),
        ({"pipeline": 2}, {"stages": (2, 3)}, ("mismatch", "parallel.stages", "2+3")),
    ],
)
def test_a_layout_by_hand_whose_stages_do_not_fit_the_model_is_refused(
    degrees: dict[str, int], options: dict[str, Any], problem: tuple[ProblemCode, str, Any]
) -> None:
    layout = Layout(0, degrees["pipeline"], torch.device("cpu"), degrees, **options)
    with expect_problem(*problem):
        build_model(language_job(2, {}).model, layout)


@pytest.mark.parametrize(
    ("workers", "parallel"), [(1, {}), (2, {"pipeline": 2}), (2, {"expert": 2, "micro_batch_groups": 8})]
)
def test_overlap_without_rows_that_travel_or_a_second_micro_batch_is_refused(
    workers: int, parallel: dict[str, Any]
) -> None:
    job = language_job(
        workers, {**parallel, "overlap": True}, moe={"num_experts": 4, "hidden_dim": 64, "group_tokens": 64}
    )
    with expect_problem("requires", "parallel.overlap", True):
        plan_job(job, H100, workers)


def test_six_stages_of_two_ranks_are_interleaved_by_threes() -> None:
    parallel = {"stages": [1, 1, 1, 1, 1, 1], "schedule": "interleaved"}
    plan = plan_job(language_job(2, parallel, num_layers=6), H100, 2)
    assert (plan.degrees.pipeline, plan.options.virtual_stages) == (2, 3)


def test_gpipe_runs_any_number_of_micro_batches() -> None:
    parallel = {"pipeline": 4, "schedule": "gpipe", "micro_batch_groups": 8}
    plan = plan_job(language_job(4, parallel), H100, 4)
    assert (plan.options.num_micro_batches, plan.options.schedule) == (1, "gpipe")


def language_job(num_workers: int, parallel: dict[str, Any], **model: Any) -> JobSpec:
    """A language model of four layers and four heads, on eight sequences of 64 tokens. `model`: further fields."""
    return JobSpec.parse(
        {
            "model": {"kind": "language", "model_dim": 64, "num_layers": 4, "ffn_dim": 128, "vocab_size": 512,
                      "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
                      **model},
            "data": {"corpus": "packages", "max_tokens": 64},
            "train": {"num_steps": 1, "batch_tokens": 512},
            "resources": {"num_workers": num_workers},
            "parallel": parallel,
        }
    )  # fmt: skip
