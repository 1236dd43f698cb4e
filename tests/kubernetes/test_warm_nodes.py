"""The standing cluster of warm nodes, applied to an API server."""

from contextlib import closing

import pytest
from pydantic import ValidationError

from service.cli.cluster_check import check_kubernetes
from service.control.kubernetes.resource import RAY_CLUSTERS
from service.control.launcher.kuberay.pools import cluster_facts
from service.control.launcher.kuberay.warm_nodes import WarmNodes, build_shared_cluster, cost_of_warm_nodes
from service.settings import Settings
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.launches import pool, settings
from tests.kubernetes.pod_security import violations
from tests.processes import await_that

WARM = settings(pool("a100"), pool("h100", node_price_per_hour=98.32), warm_nodes=2, warm_pool="h100", storage_claim="")
DASHBOARD = "http://ray-head-svc:8265"


def test_the_cluster_is_applied_once_and_resized(api_server: ApiServer) -> None:
    for num_nodes in (2, 2, 3):
        kuberay = WARM.model_copy(update={"warm_nodes": num_nodes})
        before = api_server.objects(RAY_CLUSTERS).get("ray", {})
        with closing(api_server.api()) as api, closing(WarmNodes(api, kuberay, "/cache")):
            await_that(lambda n=num_nodes: replicas(api_server) == n)  # type: ignore[misc]
        after = api_server.objects(RAY_CLUSTERS)["ray"]
        if num_nodes == 2 and before:
            assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def replicas(api_server: ApiServer) -> int | None:
    cluster = api_server.objects(RAY_CLUSTERS).get("ray")
    return cluster and cluster["spec"]["workerGroupSpecs"][0]["replicas"]


@pytest.mark.slow
def test_it_waits_for_a_server_that_is_away(api_server: ApiServer) -> None:
    with closing(api_server.api(timeout_s=1.0)) as api:
        api_server.kill()
        with closing(WarmNodes(api, WARM, "/cache")):
            api_server.start()
            await_that(lambda: replicas(api_server) == 2, timeout_s=60)


def test_each_node_is_a_pod_that_only_shared_jobs_use() -> None:
    cluster = build_shared_cluster(WARM, "/cache")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group["maxReplicas"]) == ("h100", 2, 2)
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert cluster["spec"]["authOptions"]["secretName"] == "ray-token"
    assert violations(group["template"]) == []
    own = cluster_facts(WARM.job_pools).nodes
    assert [node.pool for node in own] == ["a100"] * 4 + ["h100"] * 2
    assert [p.name for p in WARM.model_copy(update={"warm_nodes": 4}).job_pools] == ["a100"]


def test_the_cost_is_told(api_server: ApiServer) -> None:
    assert "2 nodes of pool h100" in cost_of_warm_nodes(WARM)
    assert "196.64 an hour" in cost_of_warm_nodes(WARM)
    assert "16 GPUs" in cost_of_warm_nodes(WARM.model_copy(update={"warm_pool": "a100"}))
    kuberay = WARM.model_copy(update={"kubeconfig": api_server.kubeconfig()})
    settings = Settings(
        launcher="kuberay", kuberay=kuberay, ray_dashboard_url=DASHBOARD, storage_roots=("s3://bucket",)
    )
    findings = check_kubernetes(settings)
    assert [(finding.what, finding.verdict) for finding in findings] == [("Kubernetes", "ok"), ("warm nodes", "note")]
    assert "4 x a100, 2 x h100" in findings[0].detail
    assert check_kubernetes(Settings()) == []


def test_warm_nodes_need_an_address_and_leave_some_to_others() -> None:
    with pytest.raises(ValidationError, match="http://ray-head-svc:8265"):
        Settings(launcher="kuberay", kuberay=WARM)
    with pytest.raises(ValidationError, match="leave no node"):
        settings(pool(nodes=2), warm_nodes=2)
