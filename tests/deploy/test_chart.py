"""The Helm chart is made from the kustomize base and components, and renders the same objects."""

import json
from contextlib import suppress
from typing import Any

import kubernetes_validate
import pytest
import yaml

from k8s.chart_builder.__main__ import TEMPLATES, build
from k8s.chart_builder.features import FEATURES, K8S
from tests.deploy import crd
from tests.deploy.conftest import LOADER
from tests.deploy.deployment import Manifest, Overlay
from tests.deploy.helm import CHART, render_all
from tests.deploy.overlays import OVERLAYS
from tests.deploy.test_manifests import RDMA_OVERLAYS
from tests.deploy.test_schemas import KUBERNETES_VERSION, is_core

EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
NOT_FEATURES = {"one-node"}
"""Components whose effect the values of claims have."""
ALL_ON: dict[str, Any] = {
    "image": {"pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]},
    "accelerator": "nvidia",
    "network": "sriov",
    "collectives": {"NCCL_SOCKET_IFNAME": "eth1"},
    "controlPlane": {"replicas": 3, "settings": {"SHARDYARD_KEEP_JOBS_DAYS": 30, "SHARDYARD_PORT": "8321"}},
    "standingCluster": {"workers": {"replicas": 4, "nodeSelector": {"pool": "a"}, "resources": {"limits": {"cpu": 8}}}},
    "ownClusters": {"enabled": True, "pools": [{"name": "a", "nodes": 1}], "podTemplate": {"metadata": {}}},
    "kueue": {"enabled": True, "localQueue": "team"},
    "monitoring": {"enabled": True, "labels": {"release": "stack"}},
    "backup": {"enabled": True, "place": "gs://b/backups", "keep": 3, "schedule": "0 4 * * *"},
    "postgres": {"enabled": True, "secret": "pg"},
    "objectStore": {"enabled": True, "url": "gs://b/jobs", "workloadIdentity": {"iam.gke.io/a": "b"}},
    "ingress": {"enabled": True, "host": "a.example.org", "annotations": {"a": "b"}},
    "gateway": {"enabled": True, "host": "b.example.org", "className": "gke"},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"imagee": {}}, "'imagee' not allowed"),
    ({"accelerator": "tpu"}, "/accelerator"),
    ({"kueue": {"enabled": True}}, "/ownClusters/enabled"),
    ({"controlPlane": {"replicas": 2}}, "/postgres/enabled"),
    ({"controlPlane": {"settings": {"PATH": "/bin"}}}, "invalid propertyName 'PATH'"),
    ({"network": "sriov"}, "/accelerator"),
    ({"standingCluster": {"enabled": False}}, "/standingCluster/enabled"),
    ({"ownClusters": {"enabled": True}}, "/ownClusters/pools"),
    (
        {"ownClusters": {"enabled": True, "pools": [{"name": "a", "nodes": 2}], "warmNodes": 1}},
        "/standingCluster/enabled",
    ),
    ({"objectStore": {"enabled": True}}, "/objectStore/url"),
    ({"ingress": {"enabled": True}}, "/ingress/host"),
    ({"storage": {"size": "ten"}}, "/storage/size"),
    ({"backup": {"place": "backups"}}, "/backup/place"),
]


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Every rendering of the chart that the tests need, from one process."""
    requests: dict[str, dict[str, Any]] = {"lint": {"lint": True}}
    for name in EXAMPLES:
        values = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
        # RDMA's overlays have a namespace of their own.
        namespace = "shardyard-rdma" if name in RDMA_OVERLAYS else "shardyard"
        requests[name] = {"values": values, "namespace": namespace}
    requests["all on"] = {"values": ALL_ON, "namespace": "elsewhere"}
    requests["defaults"] = {"values": {}, "namespace": "shardyard"}
    requests |= {f"refused {n}": {"values": values, "namespace": "a"} for n, (values, _) in enumerate(REFUSED)}
    return dict(zip(requests, render_all(list(requests.values())), strict=True))


def objects_of(answer: dict[str, Any]) -> list[Manifest]:
    texts = [text for name, text in answer["files"].items() if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.load_all(text, LOADER) if manifest]


def test_the_committed_templates_are_those_that_the_builder_makes(kubectl: str) -> None:
    made = build()
    committed = {path.name: path.read_text() for path in TEMPLATES.glob("*.yaml")}
    assert committed == made, "run 'python -m k8s.chart_builder'"


def test_every_component_is_a_feature() -> None:
    components = {path.name for path in (K8S / "components").iterdir()}
    assert {feature.component for feature in FEATURES} == components - NOT_FEATURES


def test_the_chart_lints(answers: dict[str, dict[str, Any]]) -> None:
    assert not answers["lint"]["errors"], answers["lint"]


def test_every_overlay_has_an_example() -> None:
    assert EXAMPLES == OVERLAYS


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_its_overlay(name: str, answers: dict[str, dict[str, Any]], overlays: dict[str, Overlay]) -> None:
    rendered = {key(manifest): comparable(manifest) for manifest in objects_of(answers[name])}
    expected = {
        key(manifest): comparable(manifest) for manifest in overlays[name].objects if manifest["kind"] != "Namespace"
    }
    assert rendered == expected


@pytest.mark.parametrize("name", ["all on", "defaults"])
def test_objects_are_those_that_an_api_server_accepts(
    name: str,
    answers: dict[str, dict[str, Any]],
    our_schemas: dict[crd.Kind, crd.Schema],
    kuberay_schemas: dict[crd.Kind, crd.Schema],
) -> None:
    manifests = objects_of(answers[name])
    for manifest in manifests:
        if is_core(manifest):
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
        else:
            schema = {**our_schemas, **kuberay_schemas}[manifest["apiVersion"], manifest["kind"]]
            assert crd.errors(schema, manifest) == [], manifest["metadata"]["name"]
    assert len({key(manifest) for manifest in manifests}) == len(manifests)


def test_values_reach_their_fields(answers: dict[str, dict[str, Any]]) -> None:
    manifests = {key(manifest): manifest for manifest in objects_of(answers["all on"])}
    assert {manifest["metadata"].get("namespace", "elsewhere") for manifest in manifests.values()} == {"elsewhere"}
    control_plane = manifests["Deployment", "control-plane"]["spec"]
    (container,) = control_plane["template"]["spec"]["containers"]
    env = [(variable["name"], variable.get("value")) for variable in container["env"]]
    assert len(dict(env)) == len(env), "each variable once"
    assert dict(env)["SHARDYARD_KEEP_JOBS_DAYS"] == "30"
    assert json.loads(dict(env)["SHARDYARD_ALLOWED_HOSTS"])[-2:] == ["a.example.org", "b.example.org"]
    assert json.loads(dict(env)["SHARDYARD_KUBERAY_POOLS"]) == ALL_ON["ownClusters"]["pools"]
    assert (control_plane["replicas"], container["imagePullPolicy"]) == (3, "Always")
    (workers,) = manifests["RayCluster", "ray"]["spec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["template"]["spec"]["nodeSelector"]) == (4, {"pool": "a"})
    assert manifests["ConfigMap", "nccl"]["data"]["NCCL_SOCKET_IFNAME"] == "eth1"
    assert manifests["LocalQueue", "team"]["spec"]["clusterQueue"] == "shardyard"
    assert manifests["ServiceAccount", "ray"]["metadata"]["annotations"] == {"iam.gke.io/a": "b"}
    assert manifests["PodMonitor", "ray"]["metadata"]["labels"]["release"] == "stack"
    assert ("PersistentVolumeClaim", "storage") not in manifests


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_values_that_make_no_sense_are_refused(number: int, answers: dict[str, dict[str, Any]]) -> None:
    assert REFUSED[number][1] in answers[f"refused {number}"].get("error", "rendered")


def key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def comparable(value: Any) -> Any:
    """A manifest without Helm's labels and what kustomize adds to kinds without namespace; lists that Kubernetes merges
    by name as mappings, and JSON in text as its value."""
    if isinstance(value, dict):
        result = {
            name: comparable(part)
            for name, part in value.items()
            if not (name.startswith("helm.sh/") or name in HELM_LABELS)
        }
        if value.get("kind") in CLUSTER_SCOPED:
            result["metadata"].pop("namespace", None)
        return result
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: comparable(item) for item in value}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if isinstance(value, str) and value.startswith(("[", "{")):
        with suppress(ValueError):  # not a setting, such as an alert's expression
            return json.loads(value)
    return value


HELM_LABELS = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
CLUSTER_SCOPED = ("ClusterQueue", "ResourceFlavor", "WorkloadPriorityClass")
