"""The Kubernetes manifests: safe as docs/design/deployment.md promises, with settings that exist."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from service.settings import Settings
from tests.deploy.deployment import ROOT, Image, Overlay

RDMA_OVERLAYS = ("rdma", "sriov")
"""Overlays whose workers need what the `restricted` standard refuses."""
ONE_NODE_OVERLAYS = ("local", "local-kuberay", "standing-backup")


def test_pods_run_without_privileges_from_one_image_with_what_they_need(overlay: Overlay) -> None:
    for pod in overlay.pods():
        security = pod.spec["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 1000), pod.owner
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner
        # A Service named shardyard would set SHARDYARD_PORT=tcp://... in every pod.
        assert pod.spec["enableServiceLinks"] is False, pod.owner
        is_rdma_worker = overlay.name in RDMA_OVERLAYS and pod.owner.startswith("ray-worker")
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if is_rdma_worker else {})},
            }, pod.owner
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][kind]), pod.owner
        assert not any("hostPath" in volume for volume in pod.spec["volumes"]), pod.owner
    (image,) = {container["image"] for pod in overlay.pods() for container in pod.containers}
    name, _, tag = image.partition(":")
    assert name.rpartition("/")[2] == "shardyard"
    assert tag not in ("", "latest")


def test_the_namespace_refuses_what_its_pods_do_not_need(overlay: Overlay) -> None:
    (namespace,) = overlay.objects_of("Namespace")
    labels = namespace["metadata"]["labels"]
    enforced = "privileged" if overlay.name in RDMA_OVERLAYS else "restricted"
    assert labels["pod-security.kubernetes.io/enforce"] == enforced
    assert labels["pod-security.kubernetes.io/warn"] == "restricted"
    namespaces = {m["metadata"].get("namespace") for m in overlay.objects if m["kind"] not in CLUSTER_KINDS}
    assert namespaces == {overlay.namespace}


CLUSTER_KINDS = ("Namespace", "ClusterQueue", "ResourceFlavor", "Topology", "WorkloadPriorityClass")
"""Kinds without a namespace."""


def test_settings_are_accepted(overlay: Overlay, settings_by_overlay: dict[str, dict[str, Any]], image: Image) -> None:
    settings = settings_by_overlay[overlay.name]
    assert settings["host"] == "0.0.0.0"
    names = ("control-plane", f"control-plane.{overlay.namespace}", f"control-plane.{overlay.namespace}.svc")
    assert set(names) <= set(settings["allowed_hosts"])
    assert settings["allowed_code"] == []


def test_written_files_lie_on_volumes_that_workers_see_too(
    overlay: Overlay, settings_by_overlay: dict[str, dict[str, Any]], image: Image
) -> None:
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in overlay.objects_of("PersistentVolumeClaim")}
    control_plane, settings = overlay.pod("control-plane"), settings_by_overlay[overlay.name]
    pods = [control_plane, *overlay.pods_of("ray-head"), *overlay.pods_of("ray-worker")]
    paths = [*settings["storage_roots"], settings["cache_dir"]]
    for path in [path for path in paths if "://" not in path]:
        (claim,) = {pod.claim_of(path) for pod in pods}
        if "://" in settings["storage_roots"][0]:
            assert claim is None, "each pod prepares corpora for itself"
            assert Path(path).is_relative_to("/tmp"), "its own volume"
        else:
            is_one_node = overlay.name in ONE_NODE_OVERLAYS
            assert claims[claim or ""]["accessModes"] == ["ReadWriteOnce" if is_one_node else "ReadWriteMany"]
    if settings["database_url"].startswith("sqlite"):
        assert claims[control_plane.claim_of(settings["state_dir"]) or ""]["accessModes"] == ["ReadWriteOnce"]
    # A claim that no pod mounts would be made, and paid for, all the same.
    mounted = {
        volume.get("persistentVolumeClaim", {}).get("claimName") for pod in pods for volume in pod.spec["volumes"]
    }
    assert set(claims) <= mounted


def test_ports_agree(overlay: Overlay) -> None:
    control_plane = overlay.pod("control-plane")
    assert control_plane.ports == {"api": int(control_plane.environment["SHARDYARD_PORT"] or 0)}
    assert control_plane.ports["api"] == Settings.model_fields["port"].default
    (port,) = overlay.find("Service", "control-plane")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (control_plane.ports["api"], "api")
    events = urlsplit(control_plane.environment["SHARDYARD_EVENTS_URL"] or "")
    assert (events.hostname, events.port) == ("control-plane", port["port"])
    for cluster in overlay.objects_of("RayCluster"):
        # KubeRay names the head's Service after the cluster.
        dashboard = urlsplit(control_plane.environment["SHARDYARD_RAY_DASHBOARD_URL"] or "")
        assert dashboard.hostname == f"{cluster['metadata']['name']}-head-svc"
        assert dashboard.port == overlay.pod("ray-head").ports["dashboard"]


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


def test_one_control_plane_at_a_time_on_sqlite(
    overlay: Overlay, settings_by_overlay: dict[str, dict[str, Any]]
) -> None:
    spec = overlay.find("Deployment", "control-plane")["spec"]
    if settings_by_overlay[overlay.name]["database_url"].startswith("sqlite"):
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > Settings.model_fields["shutdown_s"].default


def test_tokens_come_from_secrets_that_are_not_in_the_repository(overlay: Overlay) -> None:
    assert overlay.objects_of("Secret") == []
    (token,) = [e for e in overlay.pod("control-plane").container["env"] if e["name"] == "SHARDYARD_TOKEN"]
    assert token == {"name": "SHARDYARD_TOKEN", "valueFrom": {"secretKeyRef": {"name": "api-token", "key": "token"}}}
    for cluster in overlay.objects_of("RayCluster"):
        auth = cluster["spec"]["authOptions"]
        assert auth == {"mode": "token", "secretName": "ray-token"}
        (volume,) = [v for v in overlay.pod("control-plane").spec["volumes"] if v["name"] == "ray-token"]
        assert volume["secret"]["secretName"] == auth["secretName"]
        # Workers run users' code, which must not see the API's token.
        assert "api-token" not in json.dumps(cluster)


def test_rights_are_few_and_stay_in_the_namespace(overlay: Overlay) -> None:
    assert overlay.objects_of("ClusterRole") == overlay.objects_of("ClusterRoleBinding") == []
    for role in overlay.objects_of("Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]
    for binding in overlay.objects_of("RoleBinding"):
        account = {"kind": "ServiceAccount", "name": "control-plane", "namespace": overlay.namespace}
        assert binding["subjects"] == [account]
    accounts = {account["metadata"]["name"] for account in overlay.objects_of("ServiceAccount")}
    assert {pod.spec["serviceAccountName"] for pod in overlay.pods()} <= accounts


ONE_TEST = "tests/deploy/test_manifests.py::test_ports_agree"


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "outcome", "word"), [("", 0, "skipped"), ("true", 1, "CI must not pass over it")])
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
