"""Plans that a control plane makes: by a goal, for its own cluster and for pools, of models without weights; and the
workers that it admits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Cluster, Plan, plan_on_cluster, plan_request
from moe.plan.search.what_if import grid
from moe.spec import JobSpec, ResourcesSpec
from service.control.launcher.launcher import ClusterFacts, NodeFacts
from service.control.scheduling.admission import Admit, MustWait, NeverFits, admit, fingerprint
from service.control.scheduling.gang import Gang
from service.control.scheduling.planning import check_degrees, plan_on
from tests.service.control_plane import ControlPlane, spec
from tests.service.test_module_jobs import module_spec
from tests.unit.test_plans_without_weights import MIXTRAL

WORKER_RANGE = {"resources": {"min_workers": 1, "max_workers": 4}}
POOLS = [
    {"name": "old", "num_nodes": 2, "devices_per_node": 8, "device": "a100-80", "price_per_hour": 1.5},
    {"name": "new", "num_nodes": 1, "devices_per_node": 8, "device": "h100", "price_per_hour": 3.25},
]


def post_plan(plane: ControlPlane, **body: Any) -> Plan:
    answer = plane.http.post("/v1/plans", json={"spec": spec(**WORKER_RANGE), **body})
    assert answer.status_code == 200, answer.text
    return Plan.model_validate(answer.json())


@pytest.mark.slow
def test_a_goal_chooses_among_pools_and_workers_of_the_cluster_at_hand(plane: ControlPlane) -> None:
    cheapest = post_plan(plane, cluster={"pools": POOLS}, goal="cost")
    assert (cheapest.pool, cheapest.billed_devices, cheapest.money.per_hour) == ("old", 8, 8 * 1.5)
    assert post_plan(plane, cluster={"pools": POOLS}).pool == "new"
    own_plan = post_plan(plane, goal="cost")
    assert any("goal cost" in reason for reason in own_plan.reasons)
    assert (own_plan.pool, own_plan.money) == (None, None)


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
    """However many runners-up come with it."""
    request = plan_request({"spec": spec(**WORKER_RANGE), **body})
    assert request.cluster is not None
    (cell,) = grid(request, request.cluster, {"dtype": [request.spec.train.dtype]})
    local = plan_on_cluster(request.spec, request.cluster, request.query)
    for plan in (post_plan(plane, **body), post_plan(plane, **body, top=1), post_plan(plane, **body, top=9), cell.plan):
        assert (plan.candidate, plan.predicted, plan.memory, plan.pool) == (
            local.candidate, local.predicted, local.memory, local.pool,
        )  # fmt: skip


def test_what_a_goal_cannot_choose_is_refused(plane: ControlPlane) -> None:
    unpriced_pools = [{key: value for key, value in pool.items() if key != "price_per_hour"} for pool in POOLS]
    for body, path in (
        ({"goal": "fast"}, "goal"),
        ({"goal": "time", "spec": module_spec()}, "goal"),
        ({"goal": "cost", "cluster": {"pools": unpriced_pools}}, "cluster.pools[0].price_per_hour"),
        ({"cluster": {"pools": POOLS, "device": "cpu"}}, "cluster.device"),
        ({"cluster": {"pools": POOLS, "between": {"bytes_per_s": 1e10, "latency_s": 1e-5}}}, "cluster.between"),
    ):
        answer = plane.http.post("/v1/plans", json={"spec": spec(**WORKER_RANGE), **body})
        assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, path)


CHAT = {"corpus": "chat", "paths": ["{data}/chat.jsonl"]}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 512, "intermediate_size": 96}  # fmt: skip


@pytest.fixture(scope="module")
def with_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that may read a folder with a model's config and conversations."""
    data = tmp_path_factory.mktemp("data")
    (data / "config.json").write_text(json.dumps({**MIXTRAL, **SMALL}))
    (data / "chat.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    plane = ControlPlane(tmp_path_factory.mktemp("plane"), data_roots=[str(data)]).start()
    plane.data = data
    yield plane
    plane.close()


def test_a_synthetic_corpus_is_planned_on_the_cluster_at_hand(plane: ControlPlane) -> None:
    small = {"preset": "olmoe-1b-7b", "model_dim": 64, "num_layers": 2, "vocab_size": 512}
    job = spec(model=small, data={"corpus": "synthetic", "max_tokens": 256})
    check_planned_and_not_queued(plane, job, "cpu", "data.corpus")


def check_planned_and_not_queued(plane: ControlPlane, job: dict[str, Any], device: str, missing: str) -> None:
    """A job that lacks something is planned, here and on a named cluster; it is refused when posted."""
    cluster = {"num_nodes": 1, "devices_per_node": 1, "device": device}
    for body in (job, {"spec": job, "cluster": cluster}):
        plan = plane.http.post("/v1/plans", json=body)
        assert plan.status_code == 200, plan.text
        assert [entry.split()[0] for entry in plan.json()["missing"]] == [missing]
    refusal = plane.http.post("/v1/jobs", json=job)
    assert (refusal.status_code, [error["path"] for error in refusal.json()["errors"]]) == (422, [missing])
    assert plane.list_jobs() == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("data", [CHAT, {"corpus": "packages"}], ids=["chat", "packages"])
@pytest.mark.parametrize("model", ["bare folder", "bare file", "preset"])
def test_without_weights_a_job_is_planned_only(with_data: ControlPlane, model: str, data: dict[str, Any]) -> None:
    folder: Path = with_data.data
    small = {"model_dim": 64, "num_layers": 2, "vocab_size": 512, "moe": {"hidden_dim": 96},
             "attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}}  # fmt: skip
    model_spec = {"bare folder": {"from": str(folder)}, "bare file": {"from": f"{folder}/config.json"},
             "preset": {"preset": "mixtral-8x7b", **small}}[model]  # fmt: skip
    job = json.loads(json.dumps(spec(model=model_spec, data=data, adapter={"rank": 4})).replace("{data}", str(folder)))
    check_planned_and_not_queued(with_data, job, "h100", "model.from")


def test_what_else_is_wrong_with_them_is_told(with_data: ControlPlane) -> None:
    model = {"from": str(with_data.data)}
    job = spec(model=model, data={"corpus": "packages"}, adapter={"rank": 4}, storage="/elsewhere")
    answer = with_data.http.post("/v1/plans", json=job)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "storage")


@pytest.mark.parametrize(
    ("parallel", "workers"),
    [
        ({"data": 1}, 4),
        ({"data": 3}, 6),
        ({"expert": 4}, 4),
        ({"data": 2, "expert": 2}, 4),
        ({"context": 2}, 6),
        ({"tensor": 2}, 6),
        ({"pipeline": 2}, 6),
        ({"pipeline": 3, "data": 1}, 6),
    ],
)
def test_the_most_workers_that_the_degrees_divide_are_planned_for(parallel: dict[str, int], workers: int) -> None:
    request = spec(
        model={"preset": "gshard-tiny", "moe": {"num_experts": 8}},
        resources={"min_workers": 1, "max_workers": 7},
        parallel=parallel,
    )
    job_spec = JobSpec.parse(request)
    check_degrees(job_spec)
    cluster = Cluster(num_nodes=1, devices_per_node=8, memory_bytes=2**40)
    assert plan_on(job_spec, cluster).num_workers == workers


nodes = st.lists(
    st.builds(
        NodeFacts,
        id=st.uuids().map(str),
        ip=st.just("10.0.0.1"),
        cpus=st.integers(0, 16),
        gpus=st.integers(0, 8),
        memory_bytes=st.just(1 << 30),
    ),
    max_size=5,
)
resources = st.builds(
    lambda fewest, extra, cpus, gpus: ResourcesSpec(
        min_workers=fewest, max_workers=fewest + extra, cpus_per_worker=cpus, gpus_per_worker=gpus
    ),
    st.integers(1, 20),
    st.integers(0, 10),
    st.integers(1, 4),
    st.sampled_from(["auto", 0, 1]),
)


@given(nodes, st.lists(resources, max_size=12))
def test_what_is_admitted_fits(nodes: list[NodeFacts], queue: list[ResourcesSpec]) -> None:
    cluster = ClusterFacts(nodes=tuple(nodes))
    gangs: dict[str, Gang] = {}
    for number, request in enumerate(queue):
        verdict = admit(request, cluster, gangs)
        if isinstance(verdict, Admit):
            assert request.min_num_workers <= verdict.gang.workers <= request.max_num_workers
            gangs[f"job-{number}"] = verdict.gang
        elif isinstance(verdict, MustWait):
            assert gangs
            assert isinstance(admit(request, cluster, {}), Admit)
        else:
            assert isinstance(admit(request, cluster, {}), NeverFits)
    assert sum(gang.workers * gang.cpus_per_worker for gang in gangs.values()) <= cluster.cpus
    assert sum(gang.workers * gang.gpus_per_worker for gang in gangs.values()) <= cluster.gpus


def test_a_gang_is_not_split_over_what_no_worker_fits_in() -> None:
    three = ClusterFacts(nodes=tuple(NodeFacts(id=str(i), ip="", cpus=3, memory_bytes=1) for i in range(2)))
    verdict = admit(ResourcesSpec(num_workers=3, cpus_per_worker=2), three, {})
    assert verdict == NeverFits(
        "needs 3 workers of 2 CPUs each; the cluster has 6 CPUs on 2 nodes, room for 2 such workers"
    )


def test_a_cluster_is_known_by_what_it_offers() -> None:
    base_node = NodeFacts(id="a", ip="1", cpus=4, memory_bytes=8 << 30)
    equal_node = NodeFacts(id="b", ip="2", cpus=4, memory_bytes=(8 << 30) + 5000)
    larger_node = NodeFacts(id="a", ip="1", cpus=5, memory_bytes=8 << 30)
    prints = [fingerprint(ClusterFacts(nodes=(node,))) for node in (base_node, equal_node, larger_node)]
    assert prints[0] == prints[1] != prints[2]
