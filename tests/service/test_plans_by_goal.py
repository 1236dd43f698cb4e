"""Plans that a control plane makes by a goal, for its own cluster and for pools."""

from typing import Any

from moe.plan import Plan
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
    assert (cheapest.pool, cheapest.num_workers) == ("old", 1)
    assert cheapest.money is not None
    assert cheapest.money.per_hour == 1.5
    assert posted(plane, cluster={"pools": POOLS}).pool == "new"


def test_a_goal_chooses_workers_of_the_cluster_at_hand(plane: ControlPlane) -> None:
    plan = posted(plane, goal="cost")
    assert any("goal cost" in reason for reason in plan.reasons)
    assert plan.pool is None
    assert plan.money is None


def test_a_goal_chooses_nothing_of_a_module(plane: ControlPlane) -> None:
    answer = plane.http.post("/v1/plans", json={"spec": module_spec(), "goal": "time"})
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "goal")


def test_what_a_goal_cannot_choose_is_refused(plane: ControlPlane) -> None:
    unpriced = [{key: value for key, value in pool.items() if key != "price_per_hour"} for pool in POOLS]
    for body, path in (
        ({"goal": "fast"}, "goal"),
        ({"goal": "cost", "cluster": {"pools": unpriced}}, "cluster.pools[0].price_per_hour"),
        ({"cluster": {"pools": POOLS, "device": "cpu"}}, "cluster.device"),
    ):
        answer = plane.http.post("/v1/plans", json={"spec": spec(**RANGED), **body})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)
