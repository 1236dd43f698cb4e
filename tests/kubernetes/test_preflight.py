"""Checks of a cluster before jobs are launched on it, against API servers that lack something."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from moe.spec import SpecError
from service.cli.cluster_check import check_kubernetes, require_kubernetes
from service.cli.failures import Misuse
from service.control.kubernetes.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
from service.control.kubernetes.resource import LOCAL_QUEUES, PERSISTENT_VOLUME_CLAIMS, RAY_JOBS, Resource
from service.control.launcher.kuberay.preflight import ClusterAnswers, PreflightReport, check_cluster, report_on
from service.control.launcher.kuberay.ray_job import sample_ray_job
from service.kuberay_settings import KubeRaySettings
from service.settings import Settings
from tests.deploy.deployment import ROOT
from tests.kubernetes.api_server import CRDS, DEFINITIONS, ApiServer
from tests.kubernetes.apiserver.definitions import load_manifests
from tests.kubernetes.conftest import require_definitions
from tests.kubernetes.launches import pool, settings

CACHE = "/storage/cache"
KUBECONFIG_OF_NOBODY = """
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {}}]
"""
QUEUED = settings(queue="training", queues=("team",))


def rules_of(*components: str) -> list[dict[str, Any]]:
    """Rules of the Roles in these components."""
    paths = [ROOT / "k8s" / "components" / component / "role.yaml" for component in components]
    objects = [value for path in paths for value in yaml.safe_load_all(path.read_text())]
    return [rule for value in objects if value["kind"] == "Role" for rule in value["rules"]]


@contextmanager
def server(folder: Path, **options: Any) -> Iterator[ApiServer]:
    require_definitions()
    with ApiServer(folder, **options) as api_server:
        yield api_server


def report(api_server: ApiServer, kuberay: KubeRaySettings) -> PreflightReport:
    with closing(api_server.api()) as api:
        return check_cluster(api, kuberay, CACHE)


def create(api_server: ApiServer, resource: Resource, name: str, spec: dict[str, Any]) -> None:
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}, "spec": spec}
    api_server.admin("POST", resource, body=body)


def test_a_cluster_that_has_all(tmp_path: Path) -> None:
    with server(tmp_path, rules=rules_of("own-clusters", "kueue")) as api_server:
        create(api_server, PERSISTENT_VOLUME_CLAIMS, "storage", {"accessModes": ["ReadWriteMany"]})
        create(api_server, LOCAL_QUEUES, "training", {"clusterQueue": "all"})
        assert report(api_server, settings(queue="training")) == PreflightReport((), ())
        assert api_server.objects(RAY_JOBS) == {}, "the RayJob was only tried"


def test_a_cluster_without_claim_and_queue(tmp_path: Path) -> None:
    with server(tmp_path, rules=rules_of("own-clusters", "kueue")) as api_server:
        outcome = report(api_server, QUEUED)
        assert len(outcome.faults) == 2
        assert "kuberay.queue (='training')" in outcome.faults[0]
        assert "kuberay.storage_claim (='storage')" in outcome.faults[1]
        assert "LocalQueue team" in outcome.notes[0], "the Role names the queues that may be read"


def test_a_cluster_without_kuberay_and_kueue(tmp_path: Path) -> None:
    with server(tmp_path, definitions=()) as api_server:
        faults = report(api_server, settings(queue="training", storage_claim="")).faults
        assert len(faults) == 3
        for fault, resource in zip(
            faults, ("rayjobs.ray.io", "rayclusters.ray.io", "workloads.kueue.x-k8s.io"), strict=True
        ):
            assert resource in fault
            assert "CRDs" in fault


@pytest.mark.slow
def test_an_older_operator(tmp_path: Path) -> None:
    """One whose definition lacks a field that our RayJobs have."""
    require_definitions()
    (definition,) = load_manifests(CRDS / "ray.io_rayjobs.yaml")
    for version in definition["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        if "rayClusterSpec" in spec:
            spec["rayClusterSpec"]["properties"].pop("authOptions", None)
    older = tmp_path / "rayjobs.yaml"
    older.write_text(json.dumps(definition))  # JSON is YAML, and fast to write
    with server(tmp_path, definitions=(older, *DEFINITIONS[1:])) as api_server:
        (fault,) = report(api_server, settings(storage_claim="")).faults
        assert "spec.rayClusterSpec.authOptions" in fault
        assert "KubeRay 1.7" in fault


def test_missing_rights(tmp_path: Path) -> None:
    rules = [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "list", "watch", "create", "patch"]},
             {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list", "watch"]}]  # fmt: skip
    with server(tmp_path, rules=rules) as api_server:
        outcome = report(api_server, settings())
        assert [fault.split(" in namespace")[0] for fault in outcome.faults] == [
            "the credentials may not delete rayjobs.ray.io",
            "the credentials may not list, watch rayclusters.ray.io",
        ]
        assert len(outcome.notes) == 1
        assert "persistentvolumeclaims" in outcome.notes[0]


@pytest.mark.slow
def test_start_is_refused_in_words_and_waits_for_a_server_that_is_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(tmp_path, definitions=()) as api_server:
        kuberay = settings(kubeconfig=api_server.kubeconfig(), storage_claim="")
        with pytest.raises(Misuse, match=r"rayjobs\.ray\.io"):
            require_kubernetes(Settings(launcher="kuberay", kuberay=kuberay, storage_roots=("s3://bucket",)))
    require_kubernetes(Settings(launcher="kuberay", kuberay=kuberay, storage_roots=("s3://bucket",)))
    assert "jobs wait until it answers" in capsys.readouterr().err


NFS = {"name": "nfs", "persistentVolumeClaim": {"claimName": "nfs"}}
SCRATCH = {"name": "scratch", "emptyDir": {}}


def mounting(*volumes: dict[str, Any]) -> dict[str, Any]:
    """Pod template that mounts each volume at `/mnt` and its name."""
    mounts = [{"name": volume["name"], "mountPath": f"/mnt/{volume['name']}"} for volume in volumes]
    return {"spec": {"volumes": list(volumes), "containers": [{"name": "ray", "volumeMounts": mounts}]}}


@pytest.mark.parametrize(
    ("root", "fields", "words"),
    [("/storage/jobs", {}, ()), ("/storage", {}, ()), ("s3://bucket/jobs", {"storage_claim": ""}, ()),
     ("/storages/jobs", {}, ("'/storages/jobs'", "under /storage")),
     ("/storage/jobs", {"storage_claim": ""}, ("'/storage/jobs'", "SHARDYARD_KUBERAY_STORAGE_CLAIM")),
     ("/storage/jobs", {"storage_path": "/claim"}, ("'/storage/jobs'", "SHARDYARD_STORAGE_ROOTS", "under /claim")),
     ("/mnt/nfs/jobs", {"storage_claim": "", "pod_template": mounting(NFS)}, ()),
     ("/mnt/scratch", {"pod_template": mounting(SCRATCH)}, ("'/mnt/scratch'",))],
)  # fmt: skip
def test_storage_that_pods_do_not_mount(
    tmp_path: Path, root: str, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    """No API server answers here, which is a warning; hidden storage is a fault whether it does or not."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG_OF_NOBODY)
    values = Settings(
        launcher="kuberay", kuberay=settings(kubeconfig=kubeconfig, **fields), storage_roots=("s3://bucket", root)
    )
    faults = [finding.detail for finding in check_kubernetes(values) if finding.verdict == "fault"]
    assert len(faults) == bool(words)
    assert all(word in faults[0] for word in words)
    if words:
        with pytest.raises(Misuse, match="storage_roots"):
            require_kubernetes(values)


def test_the_operators_own_template_is_checked() -> None:
    with pytest.raises(SpecError) as error:
        sample_ray_job(settings(pod_template={"spec": {"hostPID": True}}), CACHE)
    assert error.value.problems[0].path == "kuberay.pod_template.spec.hostPID"


@pytest.mark.parametrize(
    ("modes", "nodes", "is_fault"),
    [(["ReadWriteMany"], 4, False), (["ReadWriteOnce"], 4, True), (["ReadWriteOnce"], 1, False), ([], 1, True)],
)
def test_access_modes_of_the_claim(modes: list[str], nodes: int, is_fault: bool) -> None:
    answers = ClusterAnswers("training", claim={"spec": {"accessModes": modes}})
    assert bool(report_on(answers, settings(pool(nodes=nodes))).faults) == is_fault


@pytest.mark.parametrize(
    ("queue", "words"),
    [({"spec": {"stopPolicy": "HoldAndDrain"}}, "HoldAndDrain"),
     ({"status": {"conditions": [{"type": "Active", "status": "False", "message": "it is gone"}]}}, "it is gone"),
     (Forbidden("no", "get", "localqueues"), "localqueues")],
)  # fmt: skip
def test_a_queue_that_admits_nothing_is_noted(queue: Any, words: str) -> None:
    outcome = report_on(ClusterAnswers("training", queues={"training": queue}), QUEUED)
    assert outcome.faults == ()
    assert words in outcome.notes[0]


def test_a_used_up_quota_is_no_fault() -> None:
    for rule, num_faults in (("quota", 0), ("webhook", 1), ("admission", 1)):
        answers = ClusterAnswers("training", dry_run=Invalid("exceeded", rule))  # type: ignore[arg-type]
        assert len(report_on(answers, settings()).faults) == num_faults


answers_of_any_kind = st.sampled_from(
    [NotFound("absent"), Forbidden("no", "get", "x"), Conflict("taken"), Invalid("bad", "schema"), Unavailable("away")]
) | st.fixed_dictionaries(
    {},
    optional={
        "spec": st.none()
        | st.fixed_dictionaries({}, optional={"accessModes": st.none() | st.lists(st.text(max_size=9))}),
        "status": st.none() | st.just({"conditions": [{}]}),
    },
)


@given(st.dictionaries(st.text(max_size=3), answers_of_any_kind, max_size=2), answers_of_any_kind, answers_of_any_kind)
def test_any_answers_are_told_in_words(queues: Any, claim: Any, dry_run: Any) -> None:
    outcome = report_on(ClusterAnswers("training", queues=queues, claim=claim, dry_run=dry_run), QUEUED)
    assert all("\n" not in line and line for line in (*outcome.faults, *outcome.notes))
