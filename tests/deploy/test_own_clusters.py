"""Jobs with a RayJob of their own: what the launcher builds from an overlay's settings fits the overlay's objects."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe.plan import Cluster, plan_job
from service.control.launcher.kuberay.pods import HEALTH_CHECKS
from service.control.launcher.kuberay.ray_job import build_ray_job
from service.kuberay_settings import KubeRaySettings
from tests.deploy import crd
from tests.deploy.deployment import Manifest, Overlay, PodTemplate
from tests.deploy.policies import ALL_PORTS, STRANGER, egress_ports, endpoint, ingress_ports, open_ports
from tests.deploy.test_policies import API, DASHBOARD, OPERATORS, PROMETHEUS, RAY_METRICS
from tests.procs.launching import launch

OVERLAYS = ["kuberay", "production", "both-launchers"]
"""Overlays with NVIDIA's GPUs and the launcher `kuberay`."""
NUM_GPUS = 16


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, overlays: dict[str, Overlay]) -> Overlay:
    return overlays[request.param]


@pytest.fixture(scope="module")
def settings(overlay: Overlay, settings_by_overlay: dict[str, dict[str, Any]]) -> KubeRaySettings:
    assert settings_by_overlay[overlay.name]["launcher"] == "kuberay"
    return KubeRaySettings.model_validate(settings_by_overlay[overlay.name]["kuberay"])


@pytest.fixture(scope="module")
def ray_job(settings: KubeRaySettings, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """RayJob of a job with a worker on each of 16 GPUs."""
    small = launch(tmp_path_factory.mktemp("job"), train={"num_steps": 5, "batch_tokens": 16384})
    cluster = Cluster(num_nodes=2, devices_per_node=8, device="cpu", memory_bytes=8 << 30)
    plan = plan_job(small.spec, cluster, NUM_GPUS)
    return build_ray_job(small.model_copy(update={"plan": plan, "gpus_per_worker": 1}), "/storage/launch", settings)


def pods_of(ray_job: Manifest) -> tuple[PodTemplate, PodTemplate]:
    """Head and worker of a RayJob's cluster, with the port that KubeRay adds."""
    cluster = ray_job["spec"]["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    head, worker = (
        PodTemplate(t["spec"]["containers"][0]["name"], t["metadata"]["labels"], t["spec"]) for t in templates
    )
    return head, worker


def test_kuberay_accepts_it(ray_job: Manifest, kuberay_schemas: dict[crd.Kind, crd.Schema]) -> None:
    assert crd.errors(kuberay_schemas["ray.io/v1", "RayJob"], ray_job) == []
    (group,) = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["replicas"] * int(limits["nvidia.com/gpu"]) == NUM_GPUS


def test_what_it_names_is_there(overlay: Overlay, ray_job: Manifest, settings: KubeRaySettings) -> None:
    assert ray_job["metadata"]["namespace"] == overlay.namespace
    for pod in pods_of(ray_job):
        assert pod.container["image"] == overlay.pod("control-plane").container["image"]
        overlay.find("ServiceAccount", pod.spec["serviceAccountName"])
        for volume in pod.spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                spec = overlay.find("PersistentVolumeClaim", claim["claimName"])["spec"]
                assert spec["accessModes"] == ["ReadWriteMany"]
    assert {pool.config_map for pool in settings.pools} == {"nccl"}
    overlay.find("ConfigMap", "nccl")
    if settings.storage_secret:
        sources = overlay.pod("control-plane").container["envFrom"]
        assert {"secretRef": {"name": settings.storage_secret}} in sources, "the control plane reads jobs' files, too"


def test_the_role_covers_the_objects_that_settings_name(overlay: Overlay, settings: KubeRaySettings) -> None:
    names = {
        resource: set(rule["resourceNames"])
        for role in overlay.objects_of("Role")
        for rule in role["rules"]
        for resource in rule["resources"]
        if "resourceNames" in rule
    }
    assert names["persistentvolumeclaims"] >= {settings.storage_claim} - {""}
    assert names.get("localqueues", set()) == {settings.queue, *settings.queues} - {""}


def test_a_laptop_has_room_for_a_job(
    overlays: dict[str, Overlay], settings_by_overlay: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    overlay = overlays["local-kuberay"]
    settings = KubeRaySettings.model_validate(settings_by_overlay[overlay.name]["kuberay"])
    small = launch(tmp_path)
    plan = plan_job(small.spec, Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=8 << 30), 2)
    job = build_ray_job(small.model_copy(update={"plan": plan}), "/storage/launch", settings)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    requests = [pod.container["resources"]["requests"]["cpu"] for pod in (overlay.pod("control-plane"), *pods_of(job))]
    assert (group["replicas"], requests) == (1, ["200m", "300m", "2"])
    (pool,) = settings.pools
    assert pool.nodes == 1, "its claim is written by one node"
    (volume,) = [v for v in pods_of(job)[1].spec["volumes"] if "persistentVolumeClaim" in v]
    claim = overlay.find("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    (rule,) = [rule for rule in overlay.find("Role", "control-plane")["rules"] if "resourceNames" in rule]
    assert rule["resourceNames"] == [claim["metadata"]["name"]]


def test_queues_and_priorities_are_there(overlay: Overlay, settings: KubeRaySettings) -> None:
    queues = {queue["metadata"]["name"] for queue in overlay.objects_of("LocalQueue")}
    priorities = {priority["metadata"]["name"] for priority in overlay.objects_of("WorkloadPriorityClass")}
    assert {settings.queue, *settings.queues} - {""} == queues
    assert {settings.priority_class, *settings.priority_classes} - {""} == priorities
    flavors = {flavor["metadata"]["name"]: flavor["spec"] for flavor in overlay.objects_of("ResourceFlavor")}
    for cluster_queue in overlay.objects_of("ClusterQueue"):
        spec = cluster_queue["spec"]
        assert spec["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": overlay.namespace}
        (group,) = spec["resourceGroups"]
        quotas = {f["name"]: {r["name"]: r["nominalQuota"] for r in f["resources"]} for f in group["flavors"]}
        assert quotas.keys() == flavors.keys()
        # A head, which requests no GPU, must not take a GPU node's flavor first.
        first, *rest = group["flavors"]
        assert quotas[first["name"]]["nvidia.com/gpu"] == "0"
        (gpu_flavor,) = rest
        num_gpus = sum(pool.nodes * pool.gpus_per_node for pool in settings.pools)
        assert int(quotas[gpu_flavor["name"]]["nvidia.com/gpu"]) == num_gpus
        for queue in overlay.objects_of("LocalQueue"):
            assert queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]


def test_policies_treat_its_pods_as_those_of_a_standing_cluster(overlay: Overlay, ray_job: Manifest) -> None:
    control_plane = overlay.pod("control-plane")
    head, worker = pods_of(ray_job)
    assert head.ports["dashboard"] == DASHBOARD
    assert open_ports(overlay, control_plane, head) == {DASHBOARD}
    assert open_ports(overlay, head, worker) == open_ports(overlay, worker, head) == {ALL_PORTS}
    for pod in (head, worker):
        assert open_ports(overlay, pod, control_plane) == {API}
        assert ingress_ports(overlay, STRANGER, pod) == set()
        assert ingress_ports(overlay, PROMETHEUS, pod) == {RAY_METRICS}
        assert endpoint(overlay, pod).namespace == overlay.namespace
        assert egress_ports(overlay, pod, STRANGER) == set()
    for operator in OPERATORS:
        assert ingress_ports(overlay, operator, head) == {DASHBOARD}, "a RayJob's status is polled there"
        assert ingress_ports(overlay, operator, worker) == set()


def test_its_pods_are_restricted_and_have_no_token(ray_job: Manifest) -> None:
    for pod in pods_of(ray_job):
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert "api-token" not in json.dumps(ray_job)


def test_only_the_launcher_kuberay_has_a_token_and_a_role(overlays: dict[str, Overlay]) -> None:
    for overlay in overlays.values():
        control_plane = overlay.pod("control-plane")
        projected = [volume for volume in control_plane.spec["volumes"] if "projected" in volume]
        roles = {role["metadata"]["name"] for role in overlay.objects_of("Role")}
        if control_plane.environment.get("SHARDYARD_LAUNCHER") != "kuberay":
            assert (projected, roles) == ([], set()), overlay.name
            continue
        (volume,) = projected
        (mount,) = [m for m in control_plane.container["volumeMounts"] if m["name"] == volume["name"]]
        assert Path(mount["mountPath"]) == Path("/var/run/secrets/kubernetes.io/serviceaccount")
        files = {
            "token": volume["projected"]["sources"][0]["serviceAccountToken"]["path"],
            "ca.crt": volume["projected"]["sources"][1]["configMap"]["items"][0]["path"],
            "namespace": volume["projected"]["sources"][2]["downwardAPI"]["items"][0]["path"],
        }
        assert list(files) == list(files.values()), "what the client library reads"
        expected = {"control-plane"} | ({"control-plane-queues"} if overlay.objects_of("ClusterQueue") else set())
        assert roles == expected | ({"control-plane-warm-nodes"} if overlay.name == "warm-nodes" else set())
        bindings = {binding["roleRef"]["name"] for binding in overlay.objects_of("RoleBinding")}
        assert bindings == roles


def test_heads_of_both_kinds_of_clusters_check_their_nodes_alike(
    overlays: dict[str, Overlay], ray_job: Manifest
) -> None:
    own_head, _ = pods_of(ray_job)
    for pod in (own_head, overlays["gpu"].pod("ray-head")):
        env = {variable["name"]: variable.get("value") for variable in pod.container["env"]}
        assert {name: env[name] for name in HEALTH_CHECKS} == HEALTH_CHECKS
