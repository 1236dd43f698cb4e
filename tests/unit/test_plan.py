"""Plans: choices, their reasons, refusals, and predictions that never overflow."""

import re
from dataclasses import fields
from typing import Any, Optional

import pytest

from moe.plan import Cluster, Degrees, Plan, cluster_of, plan_job
from moe.plan.candidate import Candidate, Options
from moe.plan.cost.layer_bytes import loss_tokens
from moe.plan.cost.memory import MemoryModel
from moe.plan.profile import OURS
from moe.spec import JobSpec, ParallelSpec, SpecError, model_spec
from tests.refusals import expect_problem, expect_problems
from tests.unit.test_spec import job

GIB = 1024**3
LAPTOP = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=8 * GIB)


def h100s(num_nodes: int) -> Cluster:
    return Cluster(num_nodes=num_nodes, devices_per_node=8, device="h100", memory_bytes=80 * GIB)


def test_the_demo_spreads_its_experts_over_both_workers() -> None:
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 2}, parallel={"expert": 2})), LAPTOP)
    assert plan.mesh == {"expert_data": 1, "expert": 2}
    assert plan.device == "cpu"
    assert "4 of each layer's 8 experts" in " ".join(plan.reasons)


@pytest.mark.slow
def test_a_job_that_does_not_fit_is_refused_with_the_workers_that_it_takes() -> None:
    spec = JobSpec.parse(job(model={"preset": "gshard-2048e-36l"}, resources={"num_workers": 8},
                             train={"batch_tokens": 2**22}))  # fmt: skip
    with expect_problem("does_not_fit", "resources", "8 workers") as error:
        plan_job(spec, h100s(1))
    (problem,) = error.value.problems
    assert "of 72.00 GiB usable" in problem.rule
    assert re.search(r"use [\d,]+ workers of this kind", problem.remedy)


@pytest.mark.parametrize("degrees", [{"expert": 1, "data": 4}, {"expert": 4}, {"data": 2}], ids=str)
def test_a_users_degrees_are_kept(degrees: dict[str, int]) -> None:
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 4}, parallel=degrees)), LAPTOP)
    assert {axis: getattr(plan.degrees, axis) for axis in degrees} == degrees
    assert plan.degrees.num_workers == 4


def test_degrees_that_no_number_of_experts_allows_name_the_ones_that_work() -> None:
    spec = JobSpec.parse(job(resources={"num_workers": 6}, parallel={"expert": 4}))
    with expect_problem("mismatch", "parallel", "expert 4"):
        plan_job(spec, LAPTOP)


def test_a_range_of_workers_takes_what_the_cluster_has() -> None:
    spec = JobSpec.parse(job(resources={"min_workers": 1, "max_workers": 4}))
    assert plan_job(spec, LAPTOP).num_workers == 2
    assert plan_job(spec, h100s(1)).num_workers == 4
    assert plan_job(spec, h100s(1), num_workers=1).num_workers == 1


def test_workers_without_tokens_are_pointed_out() -> None:
    spec = JobSpec.parse(job(resources={"num_workers": 8}))
    plan = plan_job(spec, h100s(1))
    assert any("6 run experts but hold no tokens" in reason for reason in plan.reasons)


def test_fewer_workers_that_would_be_faster_are_pointed_out() -> None:
    resources: dict[str, Any] = {"resources": {"num_workers": 2}, "parallel": {}}
    spec = JobSpec.parse(job(**resources))
    plan, single = plan_job(spec, LAPTOP), plan_job(spec, LAPTOP, 1)
    faster = plan.predicted.step_s / single.predicted.step_s - 1
    assert faster > 0.05
    assert f"a step on 1 worker is predicted {faster:.1%} faster" in " ".join(plan.reasons)
    enough = JobSpec.parse(job(**resources, train={"batch_tokens": 1 << 14}))
    assert plan_job(enough, LAPTOP, 1).predicted.step_s > plan_job(enough, LAPTOP).predicted.step_s
    assert "less" not in " ".join(plan_job(enough, LAPTOP).reasons)


def test_an_unknown_device_names_the_known() -> None:
    with expect_problem("not_a_choice", "cluster.device", "abacus"):
        cluster_of({**LAPTOP.model_dump(), "device": "abacus"})


def test_logits_cost_what_the_loss_holds_of_them() -> None:
    model = model_spec({"preset": "gshard-128e-12l"})
    spec = JobSpec.parse(job(model={"preset": "gshard-128e-12l"}, train={"num_steps": 1, "batch_tokens": 1 << 20}))
    estimate = MemoryModel(spec, h100s(1), OURS).estimate
    small, large = (estimate(Candidate(Degrees(expert=8), Options(micro_batch_groups=groups))) for groups in (4, 64))
    more_positions = 60 * spec.group_tokens // 2
    assert large.logits - small.logits == 5 * more_positions * model.model_dim * 4  # hidden states, with their gradient
    vocabulary = model.target_vocab_size
    assert small.workspace >= 3 * 4 * loss_tokens("cuda", vocabulary) * vocabulary


def test_a_user_asks_for_degrees_and_options_by_the_names_that_plans_have() -> None:
    """Except for dispatch, which sets `ranks_per_node`, and options that follow from others."""
    user_fields = set(ParallelSpec.model_fields) - {"auto", "dispatch"}
    plan_fields = {field.name: field.type for part in (Degrees, Options) for field in fields(part)}
    assert user_fields == plan_fields.keys() - {"ranks_per_node", "num_micro_batches", "max_rows"}
    for name in user_fields - {"overlap", "schedule", "stages"}:  # only `true` or `false`; None is a default of its own
        assert ParallelSpec.model_fields[name].annotation == Optional[plan_fields[name]]  # noqa: UP045


def test_what_the_user_asks_for_is_planned_and_explained() -> None:
    parallel = {"expert": 8, "expert_fsdp": 1, "tensor": 2, "fsdp": 2, "recompute": "full", "num_chunks": 2}
    spec = JobSpec.parse(job(model={"preset": "gshard-tiny"}, resources={"num_workers": 8}, parallel=parallel))
    plan = plan_job(spec, LAPTOP)
    assert plan.mesh == {"expert_data": 1, "expert": 8, "tensor": 2, "fsdp": 2}
    assert (plan.options.recompute, plan.options.num_chunks) == ("full", 2)
    assert plan.degrees.data_ranks == 4
    reasons = " ".join(plan.reasons)
    assert "tensor degree 2, as requested" in reasons
    assert "recompute full, as requested: whole blocks are recomputed in the backward pass" in reasons
    assert "rows are exchanged in 2 chunks, as requested, so that communication and computation overlap" in reasons
    assert plan.options.max_rows is not None
    assert f"at most {plan.options.max_rows:,} rows at a time" in reasons
    plain = plan_job(spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"recompute": None})}), LAPTOP)
    assert plain.memory.activations > plan.memory.activations


@pytest.mark.parametrize(
    ("workers", "parallel", "path"),
    [
        (3, {"tensor": 3}, "model.num_heads"),
        (3, {"expert_tensor": 3}, "model.moe.hidden_dim"),
        (2, {"fsdp": 4}, "parallel"),
    ],
    ids=str,
)
def test_degrees_that_do_not_divide_are_refused(workers: int, parallel: dict, path: str) -> None:
    spec = JobSpec.parse(job(model={"preset": "gshard-tiny"}, resources={"num_workers": workers}, parallel=parallel))
    with pytest.raises(SpecError) as error:
        plan_job(spec, LAPTOP)
    assert path in [problem.path for problem in error.value.problems]


def test_a_plan_by_hand_whose_degrees_do_not_multiply_is_refused() -> None:
    plan = plan_job(JobSpec.parse(job(resources={"num_workers": 4})), LAPTOP)
    fields = plan.model_dump()
    wrong = {"expert": ("mismatch", 3), "tensor": ("not_divisible", 3), "expert_fsdp": ("not_divisible", 2)}
    with expect_problems([(code, f"degrees.{axis}", value) for axis, (code, value) in wrong.items()]):
        Plan(**{**fields, "degrees": {"expert": 3, "data": 1, "tensor": 3, "expert_fsdp": 2}})
    with expect_problem("not_divisible", "degrees.fsdp", 3):
        Plan(**{**fields, "degrees": {**vars(plan.degrees), "tensor": 2, "fsdp": 3}})


def test_requests_without_effect_are_reported() -> None:
    parallel = {"num_chunks": 2, "dispatch": "hierarchical"}
    reasons = " ".join(plan_job(JobSpec.parse(job(parallel=parallel)), LAPTOP, 1).reasons)
    assert "rows are exchanged in 2 chunks, as requested, without effect: no row leaves its rank" in reasons
    assert "hierarchical dispatch, as requested, has no effect: no expert group spans nodes" in reasons


def test_hierarchical_dispatch_is_planned_where_expert_groups_span_nodes() -> None:
    spec = JobSpec.parse(job(model={"preset": "gshard-tiny"}, resources={"num_workers": 8},
                             parallel={"expert": 8, "dispatch": "hierarchical"}))  # fmt: skip
    small_nodes, large_nodes, odd_nodes = (
        Cluster(num_nodes=8, devices_per_node=num_devices, device="cpu", memory_bytes=4 << 30)
        for num_devices in (4, 8, 3)
    )
    plan = plan_job(spec, small_nodes)
    assert plan.options.ranks_per_node == 4
    assert "hierarchical dispatch over nodes of 4" in " ".join(plan.reasons)
    assert plan_job(spec, large_nodes).options.ranks_per_node is None
    with expect_problem("not_divisible", "parallel.dispatch", "hierarchical"):
        plan_job(spec, odd_nodes)


@pytest.mark.parametrize(
    ("parallel", "workers", "words"),
    [
        ({}, 1, None),
        ({"recompute": "full"}, 1, "; weights are cast to bfloat16 at each use"),
        ({"fsdp": 2, "expert_fsdp": 2}, 2, "; gathered weights are cast to bfloat16 at each use"),
    ],
)
def test_a_plan_says_where_no_narrow_copies_are_kept(parallel: dict[str, Any], workers: int, words: str | None) -> None:
    spec = JobSpec.parse(job(parallel=parallel, train={"num_steps": 1, "batch_tokens": 2048, "dtype": "bfloat16"}))
    reasons = "; " + "; ".join(plan_job(spec, LAPTOP, workers).reasons)
    assert "cast to bfloat16" not in reasons if words is None else words in reasons
