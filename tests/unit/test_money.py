"""Costs of plans on clusters that have a price."""

import json
from typing import Any

import pytest

from moe.plan import Cluster, Plan, PlanQuery, cluster_of, plan_job, plan_on_cluster, plan_request
from moe.plan.money import estimate_money, format_amount
from moe.plan.plan_file import made_for
from moe.plan.search.workers import numbers_of_workers
from moe.spec import JobSpec, SpecError
from tests.refusals import expect_problem
from tests.unit.test_spec import job

H100S = {"num_nodes": 4, "devices_per_node": 8, "device": "h100"}


def elastic_job(min_workers: int, max_workers: int, **changes: Any) -> JobSpec:
    return JobSpec.parse(job(resources={"min_workers": min_workers, "max_workers": max_workers}, **changes))


def h100s(**changes: Any) -> Cluster:
    return Cluster.model_validate({**H100S, **changes})


@pytest.mark.slow
def test_money_is_price_times_workers_times_time() -> None:
    spec = elastic_job(1, 16)
    plan = plan_job(spec, h100s(price_per_hour=2.5), 16)
    assert plan.num_steps is not None
    assert plan.money.per_hour == 2.5 * 16
    assert plan.money.per_step == pytest.approx(2.5 * 16 * plan.predicted.step_s / 3600, rel=1e-5)
    assert plan.money.run == pytest.approx(plan.money.per_step * plan.num_steps, rel=1e-5)
    tokens = plan.money.per_million_tokens * plan.tokens_per_step / 1e6
    assert tokens == pytest.approx(plan.money.per_step, rel=1e-5)
    twice = plan_job(spec, h100s(price_per_hour=5), 16)
    assert twice.money.per_step == pytest.approx(2 * plan.money.per_step, rel=1e-5)
    assert twice.candidate == plan.candidate
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_without_a_price_nothing_is_said_of_money() -> None:
    """Clusters and plans are written and distinguished as before prices existed."""
    plan, priced_plan = (plan_job(elastic_job(1, 16), cluster, 16) for cluster in (h100s(), h100s(price_per_hour=2.5)))
    assert plan.money is None
    assert not {"money", "pool"} & json.loads(plan.model_dump_json()).keys()
    assert "price_per_hour" not in h100s().model_dump(mode="json")
    assert plan.made_for == made_for(elastic_job(1, 16), h100s())
    assert priced_plan.made_for == plan.made_for, "a price changes no layout"
    assert estimate_money(None, billed_devices=8, step_s=1.0, tokens_per_step=1, num_steps=None) is None


@pytest.mark.parametrize("price", [0, -1, "2", float("nan"), float("inf"), True])
def test_a_price_is_an_amount_above_nothing(price: object) -> None:
    with pytest.raises(SpecError, match=r"cluster\.price_per_hour .*"):
        cluster_of({**H100S, "price_per_hour": price})


def test_nodes_are_paid_in_full() -> None:
    """13 workers on nodes of 8 cost 16 devices, also on a smaller cluster, unless devices are rented singly."""
    cluster, spec = h100s(price_per_hour=2.5), elastic_job(1, 32)
    plan = plan_job(spec, cluster, 13)
    assert (plan.num_billed_devices, plan.money.per_hour) == (16, 2.5 * 16)
    assert [cluster.billed_devices(num_workers) for num_workers in (1, 8, 9)] == [8, 8, 16]
    assert cluster.sized_for(3).billed_devices(3) == cluster.exactly(3).billed_devices(3) == 8
    assert h100s(billing_unit=1).billed_devices(13) == 13
    assert plan_job(spec, cluster, 16).num_billed_devices is None
    cluster = h100s(price_per_hour=2.5)
    assert cluster.sized_for(3).price_per_hour == cluster.exactly(12).price_per_hour == 2.5


@pytest.mark.slow
def test_the_cheapest_number_of_workers_leaves_no_paid_device_idle() -> None:
    """Where more workers shorten steps, part of a node costs as much as all of it."""
    spec = elastic_job(1, 32, train={"num_steps": 10, "batch_tokens": 2**18})
    plan = plan_on_cluster(spec, h100s(price_per_hour=2.5), PlanQuery(goal="cost"))
    singly = plan_on_cluster(spec, h100s(price_per_hour=2.5, billing_unit=1), PlanQuery(goal="cost"))
    assert plan.num_workers == plan.billed_devices == 8
    assert singly.num_workers < 8


def test_amounts_in_words() -> None:
    assert [format_amount(amount) for amount in (5900.4, 12.3, 0.414, 0.00312)] == ["5,900", "12.30", "0.41", "0.0031"]


def test_numbers_that_a_goal_looks_at() -> None:
    assert numbers_of_workers(1, 40, 8) == [*range(1, 17), 24, 32, 40]
    assert numbers_of_workers(12, 500, 8) == [
        *range(12, 17), 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 496, 500,
    ]  # fmt: skip
    assert numbers_of_workers(1, 40, 40) == [*range(1, 17), 20, 24, 28, 32, 40]
    assert numbers_of_workers(5, 100, 8, multiple=6) == [6, 12, 24, 48, 72, 96]
    assert numbers_of_workers(5, 7, 8, multiple=4) == []


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["time", "cost"])
def test_a_goal_chooses_what_no_other_number_of_workers_beats(goal: Any) -> None:
    spec = elastic_job(1, 8, train={"num_steps": 10, "batch_tokens": 8192})
    cluster = h100s(num_nodes=1)

    def cost(plan: Plan) -> float:
        return plan.predicted.step_s * (cluster.billed_devices(plan.num_workers) if goal == "cost" else 1)

    plan = plan_on_cluster(spec, cluster, PlanQuery(goal=goal))
    plans = [plan_job(spec, cluster, workers) for workers in range(1, 9)]
    assert cost(plan) == min(cost(rival) for rival in plans if not rival.not_yet)
    reason = plan.reasons[0]
    assert reason.startswith(f"{plan.num_workers} worker")
    assert reason.endswith(f"for goal {goal}; evaluated 1 to 8")
    assert plan.reasons[1].startswith("the next best, ")
    direct = plan_job(spec, cluster, plan.num_workers)
    assert (direct.candidate, direct.predicted, direct.runners_up) == (plan.candidate, plan.predicted, plan.runners_up)


def test_a_goal_respects_requested_degrees() -> None:
    spec = elastic_job(1, 14, parallel={"expert": 4})
    assert plan_on_cluster(spec, h100s(), PlanQuery(goal="time")).num_workers % 4 == 0


def test_a_goal_is_time_or_cost_of_a_job_that_fits() -> None:
    assert plan_request({"spec": job(), "goal": "cost"}).query.goal == "cost"
    with expect_problem("not_a_choice", "goal", "fast"):
        plan_request({"spec": job(), "goal": "fast"})
    with expect_problem("does_not_fit", "resources", "14 workers"):
        plan_on_cluster(elastic_job(1, 14), h100s(memory_bytes=1000), PlanQuery(goal="time"))


@pytest.mark.parametrize(
    ("resources", "workers", "reason"),
    [
        ({"num_workers": 2}, None, "the job sets it; resources.min_workers and max_workers would give a range"),
        ({"min_workers": 1, "max_workers": 8}, 4, "it was requested"),
        ({"min_workers": 8, "max_workers": 16}, None, "8 devices leave one number of the job's range"),
    ],
)
def test_a_goal_with_nothing_to_choose_says_so(resources: dict, workers: int | None, reason: str) -> None:
    spec, cluster = JobSpec.parse(job(resources=resources)), h100s(num_nodes=1)
    plan = plan_on_cluster(spec, cluster, PlanQuery(workers, top=1, goal="cost"))
    assert f"goal cost had no choice: {reason}" in plan.reasons
    assert plan.candidate == plan_job(spec, cluster, workers, top=1).candidate
