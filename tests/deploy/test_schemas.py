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


@pytest.mark.sample(5)
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


FAULTS: list[tuple[str, str, list[Any], Any, str]] = [
    ("production", "ClusterQueue", ["spec", "cohort"], "all", "'cohort' was unexpected"),
    (
        "production",
        "ClusterQueue",
        ["spec", "resourceGroups", 0, "coveredResources"],
        ["cpu"],
        "same number of resources",
    ),
    ("production", "ResourceFlavor", ["spec", "topologyName"], "racks", "nodeLabel is required"),
    ("production", "PrometheusRule", ["spec", "groups", 0, "rules", 0, "for"], "2 min", "does not match"),
    ("production", "ServiceMonitor", ["spec", "endpoints", 0, "honourLabels"], True, "was unexpected"),
    ("gateway", "Gateway", ["spec", "listeners", 0, "tls", "mode"], "Passthrough", "tls mode must be Terminate"),
    ("gateway", "HTTPRoute", ["spec", "rules", 0, "timeouts", "request"], "0", "does not match"),
    ("both-launchers", "Topology", ["spec", "levels", 0, "nodeLabel"], "kubernetes.io/hostname", "must be unique"),
]


@pytest.mark.parametrize(("name", "kind", "path", "value", "complaint"), FAULTS)
def test_faults_of_other_projects_kinds(
    overlays: dict[str, Overlay],
    our_schemas: dict[crd.Kind, crd.Schema],
    name: str,
    kind: str,
    path: list[Any],
    value: Any,
    complaint: str,
) -> None:
    manifest = overlays[name].objects_of(kind)[0]
    (error, *_) = crd.errors(our_schemas[manifest["apiVersion"], kind], with_value(manifest, path, value))
    assert complaint in error


def with_value(manifest: Manifest, path: list[Any], value: Any) -> Manifest:
    """Copy of a manifest with another value at a path."""
    copy = place = json.loads(json.dumps(manifest))
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


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
    cluster = with_value(overlays["local"].find("RayCluster", "ray"), path, value)
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
