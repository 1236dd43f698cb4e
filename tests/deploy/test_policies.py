"""Network policies: who reaches whom, in every overlay."""

from collections.abc import Iterable

import pytest

from tests.deploy.deployment import Manifest, Overlay, PodTemplate
from tests.deploy.policies import (
    ALL_PORTS,
    NODE_ADDRESS,
    STRANGER,
    Endpoint,
    egress_ports,
    endpoint,
    ingress_ports,
    open_ports,
    selects,
)

API, DASHBOARD, RAY_METRICS, POSTGRES, HTTP, HTTPS = 8321, 8265, 8080, 5432, 80, 443
OPERATORS = [
    Endpoint("ray-system", {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"}),
    Endpoint(
        "default", {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/component": "kuberay-operator"}
    ),
]
PROMETHEUS = Endpoint("monitoring", {"app.kubernetes.io/name": "prometheus"})
NAME_SERVERS = [
    (Endpoint("kube-system", {"k8s-app": "kube-dns"}), 53),
    (Endpoint("kube-system", {"k8s-app": "node-local-dns"}), 53),
    (Endpoint(address="169.254.20.10"), 53),
    (Endpoint("openshift-dns", {"dns.operator.openshift.io/daemonset-dns": "default"}), 5353),
]


def ray_pods(overlay: Overlay) -> list[PodTemplate]:
    return [*overlay.pods_of("ray-head"), *overlay.pods_of("ray-worker")]


def has_policy(overlay: Overlay, name: str) -> bool:
    return name in {policy["metadata"]["name"] for policy in overlay.objects_of("NetworkPolicy")}


def database_users(overlay: Overlay) -> list[PodTemplate]:
    """Pods that reach PostgreSQL."""
    return [*overlay.pods_of("control-plane"), *overlay.pods_of("backup")] if has_policy(overlay, "database") else []


def behind_policies(pods: Iterable[PodTemplate]) -> list[PodTemplate]:
    """Pods on the pod network: policies do not guard the others."""
    return [pod for pod in pods if not pod.spec.get("hostNetwork")]


def test_only_the_api_is_exposed_and_everything_else_is_denied(overlay: Overlay) -> None:
    (service,) = overlay.objects_of("Service")
    assert service["spec"]["type"] == "ClusterIP"
    assert selects({"matchLabels": service["spec"]["selector"]}, overlay.pod("control-plane").labels)
    for cluster in overlay.objects_of("RayCluster"):
        assert cluster["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    for pod in behind_policies(overlay.pods()):
        expected = {API} if pod.owner == "control-plane" else set()
        assert ingress_ports(overlay, STRANGER, pod) == expected, pod.owner
        uses_postgres = pod in database_users(overlay)
        assert egress_ports(overlay, pod, STRANGER) == ({POSTGRES} if uses_postgres else set()), pod.owner
    default_deny = overlay.find("NetworkPolicy", "default-deny")["spec"]
    assert default_deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_namespace_can_talk_as_a_job_needs(overlay: Overlay) -> None:
    control_plane = overlay.pod("control-plane")
    for pod in ray_pods(overlay):
        assert open_ports(overlay, pod, control_plane) >= {API}, pod.owner
        assert open_ports(overlay, control_plane, pod) == ({DASHBOARD} if pod.owner == "ray-head" else set())
        for other in ray_pods(overlay):
            if pod is not other or pod.owner != "ray-head":
                assert open_ports(overlay, pod, other) == {ALL_PORTS}, (pod.owner, other.owner)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.namespace)
def test_the_operator_reaches_the_dashboard_and_nothing_else(overlay: Overlay, operator: Endpoint) -> None:
    for pod in behind_policies(ray_pods(overlay)):
        expected = {DASHBOARD} if pod.owner == "ray-head" else set()
        assert ingress_ports(overlay, operator, pod) == expected, pod.owner
    elsewhere = Endpoint("team-a", operator.labels)
    assert ingress_ports(overlay, elsewhere, overlay.pod("control-plane")) == {API}
    for pod in behind_policies(ray_pods(overlay)):
        assert ingress_ports(overlay, elsewhere, pod) == set(), "the label alone admits nobody"


def test_prometheus_reaches_metrics(overlay: Overlay) -> None:
    assert ingress_ports(overlay, PROMETHEUS, overlay.pod("control-plane")) == {API}
    for pod in ray_pods(overlay):
        assert pod.ports["metrics"] == RAY_METRICS
    for pod in behind_policies(ray_pods(overlay)):
        assert ingress_ports(overlay, PROMETHEUS, pod) == {RAY_METRICS}, pod.owner
        assert ingress_ports(overlay, Endpoint("team-a", PROMETHEUS.labels), pod) == set(), pod.owner


@pytest.mark.parametrize(("server", "port"), NAME_SERVERS)
def test_every_pod_resolves_names(overlay: Overlay, server: Endpoint, port: int) -> None:
    for pod in behind_policies(overlay.pods()):
        assert egress_ports(overlay, pod, server) >= {port}, pod.owner
    assert overlay.find("NetworkPolicy", "names")["spec"]["podSelector"] == {}


def test_addresses_outside_the_cluster(overlay: Overlay) -> None:
    """The database at a private address, the API server, the object store at any, and no node's metadata."""
    control_plane = overlay.pod("control-plane")
    private, public = Endpoint(address="10.1.2.3"), Endpoint(address="203.0.113.9")
    to_store = {HTTPS} if has_policy(overlay, "object-store") else set()
    to_database = {POSTGRES} if has_policy(overlay, "database") else set()
    to_api_server = {HTTPS, 6443, 8443} if has_policy(overlay, "api-server") else set()
    assert egress_ports(overlay, control_plane, public) == to_store
    assert egress_ports(overlay, control_plane, private) == to_store | to_database | to_api_server
    for pod in behind_policies(overlay.pods()):
        assert egress_ports(overlay, pod, Endpoint(address="169.254.169.254")) == set(), "the node's credentials"
        assert HTTP not in egress_ports(overlay, pod, Endpoint(address="fd00:ec2::254")), "the same on AWS"
    for pod in behind_policies(ray_pods(overlay)):
        assert egress_ports(overlay, pod, public) == to_store, pod.owner
        nodes = to_store | ({ALL_PORTS} if overlay.name == "rdma" else set())
        assert egress_ports(overlay, pod, Endpoint(address=NODE_ADDRESS)) == nodes, pod.owner
    assert has_policy(overlay, "api-server") == (control_plane.environment.get("SHARDYARD_LAUNCHER") == "kuberay")


def test_only_workers_of_rdma_are_on_their_nodes_network(overlays: dict[str, Overlay]) -> None:
    host_network = {
        (name, pod.owner) for name, o in overlays.items() for pod in o.pods() if pod.spec.get("hostNetwork")
    }
    assert host_network == {("rdma", "ray-worker workers")}
    overlay = overlays["rdma"]
    worker, head = overlay.pod("ray-worker"), overlay.pod("ray-head")
    assert worker.spec["dnsPolicy"] == "ClusterFirstWithHostNet", "it would not find the head's Service"
    assert endpoint(overlay, worker) == Endpoint(address=NODE_ADDRESS)
    assert ingress_ports(overlay, Endpoint(address="198.51.100.1"), head) == set()
    assert ingress_ports(overlay, endpoint(overlay, worker), head) == {ALL_PORTS}


def test_policies_name_ports_that_exist(overlay: Overlay) -> None:
    for policy in overlay.objects_of("NetworkPolicy"):
        targets = [pod for pod in overlay.pods() if selects(policy["spec"]["podSelector"], pod.labels)]
        for port in named_ports(policy["spec"].get("ingress", [])):
            assert targets, f"{policy['metadata']['name']} selects no pod"
            assert all(port in pod.ports for pod in targets), f"{policy['metadata']['name']}: {port}"


def named_ports(rules: Iterable[Manifest]) -> set[str]:
    return {port["port"] for rule in rules for port in rule.get("ports", []) if isinstance(port["port"], str)}
