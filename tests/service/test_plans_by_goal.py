"""Plans that a control plane makes by a goal, for its own cluster and for pools."""

from typing import Any

import pytest

from moe.plan import Plan, plan_anywhere, plan_request
from moe.plan.search.what_if import grid
from tests.service.control_plane import ControlPlane, spec
from tests.service.test_allowed_code import module_spec

RANGED = {"resources": {"min_workers": 1, "max_workers": 4}}
POOLS = [
    {"name": "old", "num_nodes": 2, "devices_per_node": 8, "device": "a100-80", "price_per_hour": 1.5},
    {"name": "new", "num_nodes": 1, "devices_per_node": 8, "device": "h100", "price_per_hour": 3.25},
]


def posted(plane: ControlPlane, **body: Any) -> Plan:
    answer = plane.http.post("/v1/plans", json={"spec": spec(**RANGED), **body})
    assert answer.status_code == 200, answer.text
    return Plan.model_validate(answer.json())


def test_of_pools_the_best_by_the_goal_is_taken(plane: ControlPlane) -> None:
    cheapest = posted(plane, cluster={"pools": POOLS}, goal="cost")
    assert (cheapest.pool, cheapest.billed_devices) == ("old", 8)
    assert cheapest.money is not None
    assert cheapest.money.per_hour == 8 * 1.5
    assert posted(plane, cluster={"pools": POOLS}).pool == "new"


def test_a_goal_chooses_workers_of_the_cluster_at_hand(plane: ControlPlane) -> None:
    plan = posted(plane, goal="cost")
    assert any("goal cost" in reason for reason in plan.reasons)
    assert plan.pool is None
    assert plan.money is None


def test_a_goal_chooses_nothing_of_a_module(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/plans", json={"spec": module_spec(), "goal": "time"})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "goal")


JOB: dict[str, Any] = {
    "spec": {
        "model": {"preset": "olmoe-1b-7b"},
        "data": {"corpus": "synthetic", "max_tokens": 4096},
        "train": {"num_steps": 10, "batch_tokens": 65536, "dtype": "bfloat16"},
        "resources": {"num_workers": 16},
        "parallel": {"tensor": 1},
    }
}
ON_H100 = {"num_nodes": 2, "devices_per_node": 8, "device": "h100"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {"cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "cpu"}, "num_workers": 2},
        {"cluster": {"pools": POOLS}, "goal": "cost"},
        {**JOB, "cluster": ON_H100},
        {**JOB, "cluster": ON_H100, "profile": "peer", "software": "megatron-graphs"},
        {**JOB, "cluster": ON_H100, "profile": "peer", "software": "megatron-deepep", "num_workers": 8},
    ],
)
def test_a_plan_takes_as_long_here_as_in_the_library_and_in_a_grid(plane: ControlPlane, body: dict[str, Any]) -> None:
    """However many layouts are told beside it."""
    request = plan_request({"spec": spec(**RANGED), **body})
    assert request.cluster is not None
    (cell,) = grid(request, request.cluster, {"dtype": [request.spec.train.dtype]})
    local = plan_anywhere(request.spec, request.cluster, request.query)
    for plan in (posted(plane, **body), posted(plane, **body, top=1), posted(plane, **body, top=9), cell.plan):
        assert plan is not None
        assert (plan.candidate, plan.predicted, plan.memory, plan.pool) == (
            local.candidate, local.predicted, local.memory, local.pool,
        )  # fmt: skip


def test_what_a_goal_cannot_choose_is_refused(plane: ControlPlane) -> None:
    unpriced = [{key: value for key, value in pool.items() if key != "price_per_hour"} for pool in POOLS]
    for body, path in (
        ({"goal": "fast"}, "goal"),
        ({"goal": "cost", "cluster": {"pools": unpriced}}, "cluster.pools[0].price_per_hour"),
        ({"cluster": {"pools": POOLS, "device": "cpu"}}, "cluster.device"),
        ({"cluster": {"pools": POOLS, "between": {"bytes_per_s": 1e10, "latency_s": 1e-5}}}, "cluster.between"),
    ):
        answer = plane.http.post("/v1/plans", json={"spec": spec(**RANGED), **body})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
