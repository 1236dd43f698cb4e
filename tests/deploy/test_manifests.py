"""The Kubernetes manifests: valid, and safe as docs/design/deployment.md promises."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from service.settings import Settings
from tests.deploy import crd
from tests.deploy.deployment import ROOT, Image, Manifest, Overlay, PodTemplate, settings_in

KUBERNETES_VERSION = "1.32"
RAY_CLUSTER_CRD = ROOT.parent / "shared" / "kuberay-crds" / "ray.io_rayclusters.yaml"


def settings_of(container: Manifest) -> dict[str, str | None]:
    """SHARDYARD_ environment of the container; None for values from a Secret."""
    return {e["name"]: e.get("value") for e in container["env"] if e["name"].startswith("SHARDYARD_")}


def selects(selector: Manifest, pod: PodTemplate) -> bool:
    """Whether a label selector matches the pod."""
    if any(pod.labels.get(k) != v for k, v in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", "the only operator that these manifests use"
        if pod.labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def ingress_ports(overlay: Overlay, source: PodTemplate | None, target: PodTemplate) -> set[str]:
    """Ports on which `source` (None: any other pod) may reach `target`; "*" means all of them."""
    return ports_of(rule for rule in rules_of(overlay, target, "ingress") if _admits(rule.get("from"), source))


def egress_ports(overlay: Overlay, source: PodTemplate, target: PodTemplate) -> set[str]:
    """Ports of `target` that `source` may call; "*" means all of them."""

    def namespace_peers(rule: Manifest) -> list[Manifest]:
        return [peer for peer in rule["to"] if "namespaceSelector" not in peer]

    return ports_of(rule for rule in rules_of(overlay, source, "egress") if _admits(namespace_peers(rule), target))


def rules_of(overlay: Overlay, pod: PodTemplate, direction: str) -> Iterator[Manifest]:
    for policy in overlay.objects_of("NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], pod):
            yield from policy["spec"].get(direction, [])


def _admits(peers: list[Manifest] | None, pod: PodTemplate | None) -> bool:
    return peers is None or (pod is not None and any(selects(peer["podSelector"], pod) for peer in peers))


def ports_of(rules: Iterable[Manifest]) -> set[str]:
    return {str(port["port"]) for rule in rules for port in rule.get("ports", [{"port": "*"}])}


def test_core_kinds_are_valid(overlay: Overlay) -> None:
    core = [manifest for manifest in overlay.objects if manifest["kind"] != "RayCluster"]
    assert {manifest["kind"] for manifest in core} >= {
        "Namespace", "Deployment", "Service", "PersistentVolumeClaim", "NetworkPolicy",
        "ServiceAccount", "Role", "RoleBinding",
    }  # fmt: skip
    for manifest in core:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    deployment = overlay.find("Deployment", "control-plane")
    misspelt = {**deployment, "spec": {**deployment["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(misspelt, KUBERNETES_VERSION, strict=True)


@pytest.fixture(scope="session")
def ray_cluster_schema() -> crd.Schema:
    if not RAY_CLUSTER_CRD.exists():
        pytest.skip(f"KubeRay's resource definitions are not at {RAY_CLUSTER_CRD.parent}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a megabyte: 1 s instead of 10
    return crd.version(yaml.load(RAY_CLUSTER_CRD.read_text(), Loader=loader), "v1")


WRONG: list[tuple[list[Any], Any, str]] = [
    (["spec", "rayVersions"], "2.60.0", "'rayVersions' was unexpected"),
    (["spec", "authOptions", "mode"], "off", "'off' is not one of"),
    (["spec", "workerGroupSpecs", 0, "replicas"], "two", "is not of type 'integer'"),
    (["spec", "headGroupSpec", "template", "spec", "containers", 0, "imagee"], "x", "'imagee' was unexpected"),
]


def test_ray_cluster_is_what_kuberay_knows(overlay: Overlay, ray_cluster_schema: crd.Schema) -> None:
    cluster = overlay.find("RayCluster", "ray")
    assert crd.errors(ray_cluster_schema, cluster) == []
    for path, value, complaint in WRONG:
        wrong = place = json.loads(json.dumps(cluster))
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        (error,) = crd.errors(ray_cluster_schema, wrong)
        assert complaint in error


def test_pods_run_without_privileges_from_one_image_with_what_they_need(overlay: Overlay) -> None:
    for pod in overlay.pods():
        security = pod.spec["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000), pod.owner
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner
        # A Service named shardyard would set SHARDYARD_PORT=tcp://... in every pod.
        assert pod.spec["enableServiceLinks"] is False, pod.owner
        assert not pod.spec.get("hostNetwork"), pod.owner
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, pod.owner
        assert not any("hostPath" in volume for volume in pod.spec["volumes"]), pod.owner
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(pod.container["resources"][kind]), pod.owner
    (image,) = {pod.container["image"] for pod in overlay.pods()}
    name, _, tag = image.partition(":")
    assert name == "shardyard"
    assert tag not in ("", "latest")
    (namespace,) = overlay.objects_of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    namespaces = {m["metadata"].get("namespace") for m in overlay.objects if m["kind"] != "Namespace"}
    assert namespaces == {"shardyard"}


def test_the_ray_cluster_has_the_pinned_version_and_gpus_only_where_there_are_some(overlay: Overlay) -> None:
    limits = overlay.pod("ray-worker").container["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == {"local": None, "gpu": "8"}[overlay.name]
    assert "nvidia.com/gpu" not in overlay.pod("ray-head").container["resources"]["limits"]
    cluster = overlay.find("RayCluster", "ray")["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "it runs drivers only"
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_settings_exist_and_are_accepted(overlay: Overlay, image: Image) -> None:
    environment = {
        **{name: value for name, value in image.env.items() if name.startswith("SHARDYARD_")},
        **settings_of(overlay.pod("control-plane").container),
    }
    assert set(environment) <= {f"SHARDYARD_{name.upper()}" for name in Settings.model_fields}
    settings = settings_in({name: value or "0123456789abcdef" for name, value in environment.items()})
    assert settings["host"] == "0.0.0.0"
    assert {"control-plane", "control-plane.shardyard.svc"} <= set(settings["allowed_hosts"])
    assert settings["storage_roots"] == json.loads(image.env["SHARDYARD_STORAGE_ROOTS"])
    assert settings["allowed_code"] == []


def test_written_files_lie_on_volumes_that_workers_see_too(overlay: Overlay, image: Image) -> None:
    assert on_volume(image.env["SHARDYARD_STATE_DIR"], overlay.pod("control-plane"))
    pods = [overlay.pod(component) for component in ("control-plane", "ray-head", "ray-worker")]
    for path in (*json.loads(image.env["SHARDYARD_STORAGE_ROOTS"]), image.env["SHARDYARD_CACHE_DIR"]):
        (claim,) = {on_volume(path, pod) for pod in pods}
        assert claim == "storage"
    access = overlay.find("PersistentVolumeClaim", "storage")["spec"]["accessModes"]
    assert access == {"local": ["ReadWriteOnce"], "gpu": ["ReadWriteMany"]}[overlay.name]


def on_volume(path: str, pod: PodTemplate) -> str | None:
    """Claim that backs a path in a pod."""
    mounts = {Path(mount["mountPath"]): mount["name"] for mount in pod.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    for folder in (Path(path), *Path(path).parents):
        if folder in mounts:
            return volumes[mounts[folder]].get("persistentVolumeClaim", {}).get("claimName")
    return None


def test_ports_agree(overlay: Overlay) -> None:
    control_plane = overlay.pod("control-plane")
    settings = settings_of(control_plane.container)
    assert control_plane.ports == {"api": int(settings["SHARDYARD_PORT"] or 0)}
    assert control_plane.ports["api"] == Settings.model_fields["port"].default
    (port,) = overlay.find("Service", "control-plane")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (control_plane.ports["api"], "api")
    events = urlsplit(settings["SHARDYARD_EVENTS_URL"] or "")
    assert (events.hostname, events.port) == ("control-plane", port["port"])
    # KubeRay names the head's Service after the cluster.
    dashboard = urlsplit(settings["SHARDYARD_RAY_DASHBOARD_URL"] or "")
    assert (dashboard.hostname, dashboard.port) == ("ray-head-svc", overlay.pod("ray-head").ports["dashboard"])


def test_only_the_api_is_exposed_and_everything_else_is_denied(overlay: Overlay) -> None:
    (service,) = overlay.objects_of("Service")
    assert service["spec"]["type"] == "ClusterIP"
    assert selects({"matchLabels": service["spec"]["selector"]}, overlay.pod("control-plane"))
    assert overlay.find("RayCluster", "ray")["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    open_to_strangers = {pod.owner: ingress_ports(overlay, None, pod) for pod in overlay.pods()}
    assert open_to_strangers.pop("control-plane") == {"api"}
    assert set().union(*open_to_strangers.values()) == set()
    default_deny = overlay.find("NetworkPolicy", "default-deny")["spec"]
    assert default_deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_namespace_can_talk_as_a_job_needs(overlay: Overlay) -> None:
    control_plane, head, worker = (overlay.pod(component) for component in ("control-plane", "ray-head", "ray-worker"))
    assert ingress_ports(overlay, control_plane, head) == egress_ports(overlay, control_plane, head) == {"dashboard"}
    for source, target in ((head, worker), (worker, head), (worker, worker)):
        assert ingress_ports(overlay, source, target) == egress_ports(overlay, source, target) == {"*"}
    for node in (head, worker):
        assert egress_ports(overlay, node, control_plane) == {"api"}
    assert ingress_ports(overlay, control_plane, worker) == set()


def test_policies_name_ports_that_exist(overlay: Overlay) -> None:
    pods = list(overlay.pods())
    for policy in overlay.objects_of("NetworkPolicy"):
        targets = [pod for pod in pods if selects(policy["spec"]["podSelector"], pod)]
        assert targets, f"{policy['metadata']['name']} selects no pod"
        for port in named_ports(rule for rule in policy["spec"].get("ingress", [])):
            assert all(port in pod.ports for pod in targets), f"{policy['metadata']['name']}: {port}"


def named_ports(rules: Iterable[Manifest]) -> set[str]:
    return {port["port"] for rule in rules for port in rule.get("ports", []) if isinstance(port["port"], str)}


def test_probes_ask_what_the_service_answers(overlay: Overlay) -> None:
    """test_image.py checks that the service answers them."""
    container = overlay.pod("control-plane").container
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {"api"}


def test_one_control_plane_at_a_time(overlay: Overlay) -> None:
    spec = overlay.find("Deployment", "control-plane")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > Settings.model_fields["shutdown_s"].default


def test_tokens_come_from_secrets_that_are_not_in_the_repository(overlay: Overlay) -> None:
    assert overlay.objects_of("Secret") == []
    (token,) = [e for e in overlay.pod("control-plane").container["env"] if e["name"] == "SHARDYARD_TOKEN"]
    assert token == {"name": "SHARDYARD_TOKEN", "valueFrom": {"secretKeyRef": {"name": "api-token", "key": "token"}}}
    auth = overlay.find("RayCluster", "ray")["spec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "ray-token"}
    (volume,) = [v for v in overlay.pod("control-plane").spec["volumes"] if v["name"] == "ray-token"]
    assert volume["secret"]["secretName"] == auth["secretName"]
    # Workers run users' code, which must not see the API's token.
    assert "api-token" not in json.dumps(overlay.find("RayCluster", "ray"))


def test_rights_are_few_and_stay_in_the_namespace(overlay: Overlay) -> None:
    assert overlay.objects_of("ClusterRole") == overlay.objects_of("ClusterRoleBinding") == []
    (role,) = overlay.objects_of("Role")
    for rule in role["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
    (secrets,) = [rule for rule in role["rules"] if "secrets" in rule["resources"]]
    assert (secrets["verbs"], secrets["resourceNames"]) == (["get"], ["ray-token"])
    (binding,) = overlay.objects_of("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "control-plane", "namespace": "shardyard"}]
    accounts = {account["metadata"]["name"] for account in overlay.objects_of("ServiceAccount")}
    assert {pod.spec["serviceAccountName"] for pod in overlay.pods()} == accounts


ONE_TEST = "tests/deploy/test_manifests.py::test_one_control_plane_at_a_time"


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "outcome", "word"), [("", 0, "2 skipped"), ("true", 1, "CI must not pass over it")])
def test_missing_kubectl(tmp_path: Path, ci: str, outcome: int, word: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", ONE_TEST],
        env={**os.environ, "PATH": str(tmp_path), "CI": ci},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == outcome, run.stdout + run.stderr
    assert "kubectl, which renders the manifests, is not installed" in run.stdout
    assert word in run.stdout
