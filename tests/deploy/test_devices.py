"""Overlays by hardware: what fits a laptop, GPUs with their networks, and claims that are never changed."""

import json
import math

import pytest

from tests.deploy.deployment import ROOT, Overlay
from tests.deploy.overlays import OVERLAYS

GPU_RESOURCE = {"gpu": "nvidia.com/gpu", "amd": "amd.com/gpu", "rdma": "nvidia.com/gpu", "sriov": "nvidia.com/gpu"}
CONFIG_MAP = {"gpu": "nccl", "amd": "rccl", "rdma": "nccl", "sriov": "nccl"}
STANDING = ["local", "cpu", "gpu", "amd", "rdma", "sriov"]
"""Overlays with a standing Ray cluster."""


def cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def gibibytes(quantity: str) -> float:
    factor = {"Mi": 1 / 1024, "Gi": 1, "Ti": 1024}[quantity[-2:]]
    return float(quantity[:-2]) * factor


def test_local_fits_in_a_laptop_of_two_cores(overlays: dict[str, Overlay]) -> None:
    overlay = overlays["local"]
    (group,) = overlay.find("RayCluster", "ray")["spec"]["workerGroupSpecs"]
    pods = {pod.owner: 1 for pod in overlay.pods()}
    pods["ray-worker workers"] = group["maxReplicas"]
    # KubeRay adds an init container of 200m to each worker, which runs before the container and counts if it is larger.
    requests = {pod.owner: max(0.2, cores(pod.container["resources"]["requests"]["cpu"])) for pod in overlay.pods()}
    assert math.fsum(requests[owner] * count for owner, count in pods.items()) <= 1.5
    assert cores(overlay.pod("ray-worker").container["resources"]["limits"]["cpu"]) >= 1, "Ray's CPUs of a pod"


@pytest.mark.parametrize("name", STANDING)
def test_gpus_only_where_there_are_some(overlays: dict[str, Overlay], name: str) -> None:
    overlay = overlays[name]
    worker, head = overlay.pod("ray-worker"), overlay.pod("ray-head")
    gpus = {k: v for k, v in worker.container["resources"]["limits"].items() if k.endswith("/gpu")}
    assert gpus == ({GPU_RESOURCE[name]: "8"} if name in GPU_RESOURCE else {})
    assert not any(k.endswith("/gpu") for k in head.container["resources"]["limits"])
    assert worker.container["resources"]["requests"].keys() == worker.container["resources"]["limits"].keys()
    cluster = overlay.find("RayCluster", "ray")["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "it runs drivers only"
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("name", GPU_RESOURCE)
def test_gpu_workers_have_their_librarys_settings_and_shared_memory(overlays: dict[str, Overlay], name: str) -> None:
    overlay = overlays[name]
    worker = overlay.pod("ray-worker")
    (source,) = worker.container["envFrom"]
    config = overlay.find("ConfigMap", source["configMapRef"]["name"])
    assert config["metadata"]["name"] == CONFIG_MAP[name]
    assert all(key.startswith(("NCCL_", "GLOO_")) for key in config["data"])
    assert any(t["key"] == GPU_RESOURCE[name] and t["operator"] == "Exists" for t in worker.spec["tolerations"])
    (mount,) = [mount for mount in worker.container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in worker.spec["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    (group,) = overlay.find("RayCluster", "ray")["spec"]["workerGroupSpecs"]
    objects_gib = int(group["rayStartParams"]["object-store-memory"]) / 2**30
    # Ray puts its object store elsewhere, slowly, if shared memory is smaller.
    assert (
        objects_gib
        < gibibytes(volume["emptyDir"]["sizeLimit"])
        < gibibytes(worker.container["resources"]["limits"]["memory"])
    )


@pytest.mark.parametrize(("name", "device"), [("rdma", "rdma/hca_shared_devices_a"), ("sriov", "nvidia.com/rdma-vf")])
def test_rdma_has_a_namespace_of_its_own(overlays: dict[str, Overlay], name: str, device: str) -> None:
    overlay = overlays[name]
    assert overlay.namespace not in {o.namespace for other, o in overlays.items() if other not in ("rdma", "sriov")}
    worker = overlay.pod("ray-worker")
    assert worker.container["resources"]["limits"][device] == "1"
    assert "NCCL_IB_HCA" in overlay.find("ConfigMap", "nccl")["data"]
    hosts = json.loads(overlay.pod("control-plane").environment["SHARDYARD_ALLOWED_HOSTS"] or "")
    assert f"control-plane.{overlay.namespace}.svc" in hosts


def test_an_overlay_over_another_changes_no_claim(overlays: dict[str, Overlay]) -> None:
    """The API server refuses it: everything but a claim's size and its class's attributes is immutable."""
    specs: dict[tuple[str, str], tuple[str, object]] = {}
    for overlay in (overlays[name] for name in OVERLAYS):
        for claim in overlay.objects_of("PersistentVolumeClaim"):
            identity = (overlay.namespace, claim["metadata"]["name"])
            spec = {k: v for k, v in claim["spec"].items() if k != "resources"}
            other, expected = specs.setdefault(identity, (overlay.name, spec))
            assert spec == expected, f"{identity} of {overlay.name} and {other}"
    assert ("shardyard", "storage-one-node") in specs
