"""Plans on clusters of several kinds of nodes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.plan import Cluster, Plan, PlanQuery, Pools, cluster_of, plan_job, plan_on_cluster, plan_request
from moe.plan.search.pools import fit_pools
from moe.plan.search.what_if import grid
from moe.spec import JobSpec, ProblemCode, SpecError
from tests.grid import num_cases
from tests.refusals import expect_problem, expect_problems
from tests.unit.test_money import elastic_job
from tests.unit.test_spec import job

OLD = {"name": "old", "num_nodes": 2, "devices_per_node": 8, "device": "a100-80", "price_per_hour": 1.5}
NEW = {"name": "new", "num_nodes": 1, "devices_per_node": 8, "device": "h100", "price_per_hour": 3.25}
TINY = {**OLD, "name": "tiny", "memory_bytes": 1000}


def pools(*fields: dict[str, Any]) -> Pools:
    cluster = cluster_of({"pools": list(fields)})
    assert isinstance(cluster, Pools)
    return cluster


def without(facts: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in keys}


def score(plan: Plan, goal: str | None) -> float:
    if goal != "cost":
        return plan.predicted.step_s
    return plan.money.per_step


POOL = st.fixed_dictionaries({
    "num_nodes": st.integers(1, 2), "devices_per_node": st.sampled_from([1, 2, 4]),
    "device": st.sampled_from(["cpu", "a100-80", "h100"]), "price_per_hour": st.floats(0.1, 10),
})  # fmt: skip


@pytest.mark.slow
@settings(max_examples=num_cases(15))
@given(
    entries=st.lists(POOL, min_size=1, max_size=3),
    goal=st.sampled_from([None, "time", "cost"]),
    min_workers=st.integers(1, 2),
    extra_workers=st.integers(0, 3),
)
def test_no_pool_alone_is_better(
    entries: list[dict[str, Any]], goal: Any, min_workers: int, extra_workers: int
) -> None:
    """By the goal; and the plan is the one for its pool alone."""
    spec = elastic_job(min_workers, min_workers + extra_workers)
    cluster = pools(*({"name": str(number), **entry} for number, entry in enumerate(entries)))
    plans: dict[str, Plan] = {}
    for pool in cluster.pools:
        if pool.cluster.num_devices >= min_workers:
            plans[pool.name] = plan_on_cluster(spec, pool.cluster, PlanQuery(goal=goal))
    if not plans:
        with pytest.raises(SpecError, match="must be at most the number of devices"):
            plan_on_cluster(spec, cluster, PlanQuery(goal=goal))
        return
    plan = plan_on_cluster(spec, cluster, PlanQuery(goal=goal))
    assert plan.pool is not None
    for pool_plan in plans.values():
        assert score(plan, goal) <= score(pool_plan, goal) * (1 + 1e-5)
    expected = plans[plan.pool]
    assert (plan.candidate, plan.predicted, plan.money) == (expected.candidate, expected.predicted, expected.money)
    for pool in cluster.pools:
        assert any(f"pool {pool.name}" in reason for reason in plan.reasons)


def test_the_goal_decides_between_pools() -> None:
    spec = JobSpec.parse(job(resources={"num_workers": 2}))
    cluster = pools(OLD, NEW)
    fastest, cheapest = (plan_on_cluster(spec, cluster, PlanQuery(goal=goal)) for goal in ("time", "cost"))
    assert (fastest.pool, cheapest.pool) == ("new", "old")
    assert fastest.reasons[0].startswith("pool new: the fastest of 2 pools that hold it, ")
    assert cheapest.reasons[0].startswith("pool old: the cheapest of 2 pools that hold it, ")
    assert "2 workers would take" in cheapest.reasons[1]
    assert cheapest.reasons[1].endswith("more expensive")
    assert not any("nothing to choose" in reason for reason in cheapest.reasons)
    assert plan_on_cluster(spec, cluster).pool == "new"
    assert Plan.model_validate_json(cheapest.model_dump_json()) == cheapest


def test_reasons_say_why_pools_do_not_hold_a_job() -> None:
    plan = plan_on_cluster(elastic_job(9, 16), pools(OLD, NEW, TINY))
    assert (plan.pool, plan.reasons[0]) == ("old", "pool old: the only one of 3 pools that holds it")
    assert plan.reasons[1].startswith("pool new cannot hold it: resources (='9 workers') must be at most the number")
    assert "pool tiny cannot hold it: resources (='16 workers') must hold the model" in plan.reasons[2]
    with expect_problems(
        [("out_of_range", "pool new: resources", "9 workers"), ("does_not_fit", "pool tiny: resources", "16 workers")]
    ):
        plan_on_cluster(elastic_job(9, 16), pools(NEW, TINY))


def test_costs_of_pools_need_prices_and_workers_are_multiples_of_degrees() -> None:
    with pytest.raises(SpecError, match=r"cluster\.pools\[1\]\.price_per_hour is required for pool new"):
        plan_on_cluster(elastic_job(1, 4), pools(OLD, without(NEW, "price_per_hour")), PlanQuery(goal="cost"))
    cluster = pools(without(NEW, "price_per_hour"))
    assert plan_on_cluster(elastic_job(1, 4), cluster, PlanQuery(goal="cost")).billed_devices == 8
    plan = plan_on_cluster(
        elastic_job(2, 15, parallel={"expert": 4}), pools({**OLD, "num_nodes": 1, "devices_per_node": 6})
    )
    assert plan.num_workers == 4


IMPOSSIBLE: list[tuple[dict[str, Any], ProblemCode, str]] = [
    ({"pools": [OLD, {**NEW, "name": "old"}]}, "duplicate", "cluster.pools[1].name"),
    ({"pools": [OLD], "device": "h100"}, "conflict", "cluster.device"),
    ({"pools": [OLD, {**NEW, "num_nodes": 0}]}, "out_of_range", "cluster.pools[1].num_nodes"),
    ({"pools": [{**OLD, "device": "abacus"}]}, "not_a_choice", "cluster.pools[0].device"),
    ({"pools": [without(OLD, "name")]}, "missing", "cluster.pools[0].name"),
    ({"pools": [{**OLD, "colour": "red"}]}, "unknown_key", "cluster.pools[0].colour"),
    ({"pools": [OLD], "colour": "red"}, "unknown_key", "cluster.colour"),
    ({"pools": []}, "empty", "cluster.pools"),
    ({"pools": {"old": OLD}}, "wrong_type", "cluster.pools"),
    ({"pools": [{**OLD, "name": str(number)} for number in range(17)]}, "too_large", "cluster.pools"),
    ({"pools": [OLD, NEW], "between": {"bytes_per_s": 2e10, "latency_s": 1e-5}}, "unsupported", "cluster.between"),
]


@pytest.mark.parametrize(("given", "code", "path"), IMPOSSIBLE)
def test_impossible_pools_are_refused(given: Any, code: ProblemCode, path: str) -> None:
    with expect_problem(code, path):
        cluster_of(given)


def test_pools_are_written_as_they_are_read() -> None:
    cluster = pools(OLD, NEW, TINY)
    assert cluster_of(cluster.model_dump(mode="json")) == cluster
    assert plan_request({"spec": job(), "cluster": cluster.model_dump(mode="json")}).cluster == cluster
    assert isinstance(cluster_of(without(OLD, "name")), Cluster), "one kind of nodes is a cluster"


def test_a_table_over_models_has_the_best_pool_of_each() -> None:
    request = plan_request({"spec": job(resources={"num_workers": 2}), "goal": "cost"})
    cells = grid(request, pools(OLD, NEW), {"experts": ["8", "16"]})
    assert [cell.plan and cell.plan.pool for cell in cells] == ["old", "old"]
    with pytest.raises(
        SpecError, match=r"--what-if \(='nodes'\) applies to one kind of nodes, but the cluster has pools"
    ):
        grid(request, pools(OLD, NEW), {"experts": ["8"], "nodes": ["2"]})


def test_a_grid_over_devices_replaces_a_described_device() -> None:
    facts = {"name": "x100", "memory_bytes": 80 * 10**9, "bfloat16_flops_per_s": 5e14, "memory_bytes_per_s": 2e12,
             "link_bytes_per_s": 3e11}  # fmt: skip
    cluster = cluster_of({"num_nodes": 1, "devices_per_node": 2, "device": facts})
    cells = grid(plan_request(job(resources={"num_workers": 2})), cluster, {"device": ["h100", "b200"]})
    assert [cell.plan.device_type for cell in cells] == ["h100", "b200"]


def test_the_smallest_of_pools_kinds() -> None:
    """The pool with the fewest devices where no goal is given; its configured number of nodes does not count."""
    spec = JobSpec.parse(job())
    slim = {**NEW, "memory_bytes": 60_000_000}
    plan, smallest = fit_pools(spec, pools(OLD, {**slim, "num_nodes": 1, "devices_per_node": 1}))
    assert (plan.pool, smallest.num_devices) == ("old", plan.num_workers)
    assert plan_job(spec, smallest, plan.num_workers).candidate == plan.candidate
    with pytest.raises(SpecError, match="pool tiny: resources"):
        fit_pools(spec, pools(TINY))


@pytest.mark.slow
@pytest.mark.parametrize("goal", [None, "time"])
def test_a_cluster_with_too_few_devices_counts_with_as_many_nodes_as_the_job_takes(goal: Any) -> None:
    """On one node, all workers would use its links, which are faster than links between nodes."""
    spec = JobSpec.parse(
        job(resources={"num_workers": 16}, model={"preset": "gshard-128e-12l"}, train={"batch_tokens": 65536})
    )
    one_node, two_nodes = (Cluster(num_nodes=nodes, devices_per_node=8, device="h100") for nodes in (1, 2))
    plan, full_plan = (plan_on_cluster(spec, cluster, PlanQuery(goal=goal)) for cluster in (one_node, two_nodes))
    assert (plan.degrees, plan.predicted) == (full_plan.degrees, full_plan.predicted)
    large_node = Cluster(num_nodes=1, devices_per_node=16, device="h100")
    assert plan.predicted.step_s > plan_on_cluster(spec, large_node, PlanQuery(goal=goal)).predicted.step_s
