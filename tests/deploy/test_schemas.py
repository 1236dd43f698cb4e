"""Every object of every overlay is one that an API server accepts, strictly: no unknown field, no broken rule."""

import json
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy import crd
from tests.deploy.deployment import Manifest, Overlay

KUBERNETES_VERSION = "1.32"


def is_core(manifest: Manifest) -> bool:
    group = manifest["apiVersion"].rpartition("/")[0]
    return "." not in group or group in ("networking.k8s.io", "rbac.authorization.k8s.io", "policy", "batch", "apps")


def test_core_kinds(overlay: Overlay) -> None:
    for manifest in filter(is_core, overlay.objects):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    deployment = overlay.find("Deployment", "control-plane")
    misspelt = {**deployment, "spec": {**deployment["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(misspelt, KUBERNETES_VERSION, strict=True)


def test_kinds_of_other_projects(overlay: Overlay, our_schemas: dict[crd.Kind, crd.Schema]) -> None:
    for manifest in overlay.objects:
        if not is_core(manifest) and not manifest["apiVersion"].startswith("ray.io/"):
            schema = our_schemas[manifest["apiVersion"], manifest["kind"]]
            assert crd.errors(schema, manifest) == [], manifest["metadata"]["name"]


def test_kinds_of_kuberay(overlay: Overlay, kuberay_schemas: dict[crd.Kind, crd.Schema]) -> None:
    for manifest in overlay.objects:
        if manifest["apiVersion"].startswith("ray.io/"):
            assert crd.errors(kuberay_schemas[manifest["apiVersion"], manifest["kind"]], manifest) == []


CLUSTER_FAULTS: list[tuple[list[Any], Any, str]] = [
    (["spec", "rayVersions"], "2.60.0", "'rayVersions' was unexpected"),
    (["spec", "authOptions", "mode"], "off", "'off' is not one of"),
    (["spec", "workerGroupSpecs", 0, "replicas"], "two", "is not of type 'integer'"),
    (["spec", "headGroupSpec", "template", "spec", "containers", 0, "imagee"], "x", "'imagee' was unexpected"),
    (["spec", "managedBy"], "someone", "$.spec.managedBy: the managedBy field value must be either"),
]


@pytest.mark.parametrize(("path", "value", "complaint"), CLUSTER_FAULTS)
def test_faults_of_a_ray_cluster(
    overlays: dict[str, Overlay],
    kuberay_schemas: dict[crd.Kind, crd.Schema],
    path: list[Any],
    value: Any,
    complaint: str,
) -> None:
    cluster = place = json.loads(json.dumps(overlays["local"].find("RayCluster", "ray")))
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (error,) = crd.errors(kuberay_schemas["ray.io/v1", "RayCluster"], cluster)
    assert complaint in error


def test_rules_of_nested_fields(kuberay_schemas: dict[crd.Kind, crd.Schema]) -> None:
    condition = {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed"}
    rules = [{"policy": "DeleteCluster", "condition": condition}]
    job = {"spec": {"entrypoint": "true", "deletionStrategy": {"deletionRules": rules}}}
    (error,) = crd.broken_rules(kuberay_schemas["ray.io/v1", "RayJob"], job)
    assert error.startswith(
        "$.spec.deletionStrategy.deletionRules[0].condition: JobStatus and JobDeploymentStatus cannot"
    )
