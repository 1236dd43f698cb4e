"""The tests' API server as kubectl finds it, which knows the real one."""

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from service.control.kubernetes import CONFIG_MAPS, PODS, RAY_JOBS
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.objects import Object, pod, ray_job
from tests.processes import await_that


class Kubectl:
    """kubectl with the credentials of the service."""

    def __init__(self, server: ApiServer, path: str) -> None:
        self._command = [path, "--kubeconfig", str(server.kubeconfig())]
        self._environment = {**os.environ, "HOME": str(server.certificate.parent)}  # of its cache

    def run(self, *arguments: str, stdin: Object | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            input=None if stdin is None else json.dumps(stdin),
            capture_output=True,
            text=True,
            timeout=120,
            env=self._environment,
        )

    def get(self, *arguments: str) -> Any:
        run = self.run("get", *arguments, "-o", "json", "--show-managed-fields")
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def apply(self, manifest: Object, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("apply", "--server-side", "--validate=strict", "-f", "-", *options, stdin=manifest)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )


@pytest.fixture(scope="module")
def kubectl(shared_server: ApiServer) -> Kubectl:
    path = shutil.which("kubectl")
    if path is None:
        absent = "kubectl, the client that this server is held against, is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{absent}; CI must not pass over it")
        pytest.skip(absent)
    return Kubectl(shared_server, path)


def test_an_apply_creates_and_its_repetition_changes_nothing(kubectl: Kubectl) -> None:
    first = kubectl.apply(ray_job("applied"), "--field-manager=shardyard")
    assert first.returncode == 0, first.stderr
    created = kubectl.get("rayjob", "applied")
    assert kubectl.apply(ray_job("applied"), "--field-manager=shardyard").returncode == 0
    assert kubectl.get("rayjob", "applied") == created
    assert created["spec"]["backoffLimit"] == 0, "a default of the definition"
    (owner,) = created["metadata"]["managedFields"]
    assert (owner["manager"], owner["operation"]) == ("shardyard", "Apply")
    containers = owner["fieldsV1"]["f:spec"]["f:rayClusterSpec"]["f:headGroupSpec"]["f:template"]["f:spec"][
        "f:containers"
    ]
    assert containers == {'k:{"name":"ray-head"}': {".": {}, "f:image": {}, "f:name": {}}}


def test_an_applied_field_that_is_left_out_later_goes(kubectl: Kubectl) -> None:
    assert kubectl.apply(ray_job("shrinking", suspend=True, activeDeadlineSeconds=60)).returncode == 0
    assert kubectl.apply(ray_job("shrinking", suspend=True)).returncode == 0
    spec = kubectl.get("rayjob", "shrinking")["spec"]
    assert spec["suspend"] is True
    assert "activeDeadlineSeconds" not in spec


def test_two_managers_conflict_over_a_field_until_one_forces(kubectl: Kubectl) -> None:
    assert kubectl.apply(ray_job("contended", suspend=True), "--field-manager=kueue").returncode == 0
    refusal = kubectl.apply(ray_job("contended", suspend=False), "--field-manager=shardyard")
    assert refusal.returncode == 1
    assert 'conflict with "kueue": .spec.suspend' in refusal.stderr
    assert kubectl.get("rayjob", "contended")["spec"]["suspend"] is True
    forced = kubectl.apply(ray_job("contended", suspend=False), "--field-manager=shardyard", "--force-conflicts")
    assert forced.returncode == 0, forced.stderr
    value = kubectl.get("rayjob", "contended")
    assert value["spec"]["suspend"] is False
    owners = {e["manager"]: e["fieldsV1"]["f:spec"] for e in value["metadata"]["managedFields"]}
    assert "f:suspend" in owners["shardyard"]
    assert "f:suspend" not in owners["kueue"]


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        (ray_job("misspelt", suspended=True), ".spec.suspended"),
        (ray_job("mistyped", backoffLimit="none"), "spec.backoffLimit"),
        (ray_job("halved", deletionStrategy={"onSuccess": {"policy": "DeleteCluster"}}), "spec.deletionStrategy"),
        ({**pod("podless"), "spec": {"containres": []}}, ".spec.containres"),
        (ray_job("Capital"), "metadata.name"),
        (ray_job("labelled", "x" * 64), "metadata.labels"),
    ],
)
def test_a_refused_manifest_names_the_field(kubectl: Kubectl, manifest: Object, field: str) -> None:
    refusal = kubectl.apply(manifest)
    assert refusal.returncode == 1
    assert field in refusal.stderr
    assert kubectl.run("get", manifest["kind"], manifest["metadata"]["name"]).returncode == 1


def test_a_rule_on_the_old_value_holds_on_updates_alone(kubectl: Kubectl) -> None:
    assert kubectl.apply(ray_job("managed", managedBy="ray.io/kuberay-operator")).returncode == 0
    refusal = kubectl.apply(ray_job("managed", managedBy="kueue.x-k8s.io/multikueue"))
    assert "spec.managedBy" in refusal.stderr
    assert "immutable" in refusal.stderr


def test_a_replacement_of_an_older_version_is_refused(kubectl: Kubectl) -> None:
    assert kubectl.apply(ray_job("versioned")).returncode == 0
    old = kubectl.get("rayjob", "versioned")
    assert (
        kubectl.run("patch", "rayjob", "versioned", "--type=merge", "-p", '{"spec":{"suspend":true}}').returncode == 0
    )
    refusal = kubectl.run("replace", "-f", "-", stdin=old)
    assert "Error from server (Conflict)" in refusal.stderr
    assert "the object has been modified" in refusal.stderr


def test_patches_of_the_object_and_of_its_status(kubectl: Kubectl) -> None:
    assert kubectl.apply(ray_job("patched")).returncode == 0
    operations = (
        '[{"op": "add", "path": "/metadata/labels/a", "value": "b"}, {"op": "remove", "path": "/spec/entrypoint"}]'
    )
    run = kubectl.run("patch", "rayjob", "patched", "--type=json", "-p", operations)
    assert run.returncode == 0, run.stderr
    status = '{"spec": {"suspend": true}, "status": {"jobStatus": "RUNNING"}}'
    run = kubectl.run("patch", "rayjob", "patched", "--type=merge", "--subresource=status", "-p", status)
    assert run.returncode == 0, run.stderr
    value = kubectl.get("rayjob", "patched")
    assert value["metadata"]["labels"]["a"] == "b"
    assert "entrypoint" not in value["spec"]
    assert "suspend" not in value["spec"], "a write of the status leaves the rest alone"
    assert value["status"]["jobStatus"] == "RUNNING"
    assert value["metadata"]["generation"] == 2, "the specification changed once"


def test_a_watch_prints_what_happens(kubectl: Kubectl, shared_server: ApiServer) -> None:
    watching = kubectl.start("get", "rayjob", "-l", "watched=yes", "-w", "--output-watch-events", "--no-headers")
    assert watching.stdout is not None
    try:
        await_that(lambda: shared_server.num_watches() > 0)
        manifest = ray_job("watched")
        manifest["metadata"]["labels"] = {"watched": "yes"}
        assert kubectl.apply(manifest).returncode == 0
        assert kubectl.run("label", "rayjob", "watched", "watched=no", "--overwrite").returncode == 0
        lines = [watching.stdout.readline().split()[:2] for _ in range(2)]
    finally:
        watching.kill()
        watching.communicate()
    assert lines == [["ADDED", "watched"], ["DELETED", "watched"]]


@pytest.mark.parametrize("cascade", ["background", "foreground", "orphan"])
def test_deletion_with_dependents(kubectl: Kubectl, shared_server: ApiServer, cascade: str) -> None:
    assert kubectl.apply(ray_job(f"owner-{cascade}")).returncode == 0
    owner = kubectl.get("rayjob", f"owner-{cascade}")
    shared_server.admin("POST", PODS, body=pod(f"dependent-{cascade}", owner=owner))
    run = kubectl.run("delete", "rayjob", f"owner-{cascade}", f"--cascade={cascade}", "--timeout=60s")
    assert run.returncode == 0, run.stderr
    assert f"owner-{cascade}" not in shared_server.objects(RAY_JOBS)
    if cascade == "orphan":
        assert shared_server.objects(PODS)[f"dependent-{cascade}"]["metadata"]["ownerReferences"] == []
    else:
        await_that(lambda: f"dependent-{cascade}" not in shared_server.objects(PODS))


def test_a_finalizer_holds_an_object(kubectl: Kubectl, shared_server: ApiServer) -> None:
    manifest = {"metadata": {"name": "held", "finalizers": ["shardyard.dev/test"]}, "data": {"a": "b"}}
    shared_server.admin("POST", CONFIG_MAPS, body=manifest)
    assert kubectl.run("delete", "configmap", "held", "--wait=false").returncode == 0
    assert kubectl.get("configmap", "held")["metadata"]["deletionTimestamp"]
    run = kubectl.run("patch", "configmap", "held", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
    assert run.returncode == 0, run.stderr
    assert "held" not in shared_server.objects(CONFIG_MAPS)
