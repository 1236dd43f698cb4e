"""Pod templates: merged into our pods, and refused where they break a rule of ours."""

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.spec import ResourcesSpec, SpecError
from service.control.launcher.kuberay.pod_template import check_template, merge_template
from service.control.launcher.kuberay.pods import (
    JOB_TEMPLATE,
    PodMaker,
    check_jobs_template,
    rules_for_job,
    rules_for_operator,
)
from service.control.launcher.kuberay.pools import worker_pods
from tests.deploy.deployment import ROOT
from tests.kubernetes import launches
from tests.kubernetes.pod_security import violations
from tests.kubernetes.templates import damaged_templates, junk, templates
from tests.refusals import expect_problem

KUBERAY = launches.settings(
    launches.pool(node_selector={"gpu": "h100"}, tolerations=({"key": "gpu", "operator": "Exists"},))
)
CACHE = "/storage/cache"
RULES = rules_for_operator(KUBERAY, CACHE)
JOB_RULES = rules_for_job(launches.settings(template_secrets=("s",), template_claims=("corpora",)), CACHE)
POD = PodMaker(KUBERAY, labels={"shardyard.dev/job": "j"}, submission_id="j-a1", cache=CACHE).make_worker(
    worker_pods(KUBERAY.pools[0], 8, 1, 1)
)
Manifest = dict[str, Any]


def check_ours_survives(merged: Manifest) -> None:
    """Assert that every field of ours is there, and that Pod Security admits the pod."""
    ours, spec = POD["spec"], merged["spec"]
    container, our_container = spec["containers"][0], ours["containers"][0]
    for field in ("name", "resources", "lifecycle", "ports"):
        assert container[field] == our_container[field]
    assert our_container["securityContext"].items() <= container["securityContext"].items()
    for field in ("env", "volumeMounts"):
        assert container[field][: len(our_container[field])] == our_container[field]
    for field in ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks",
                  "terminationGracePeriodSeconds"):  # fmt: skip
        assert spec[field] == ours[field]
    assert ours["securityContext"].items() <= spec["securityContext"].items()
    assert ours["nodeSelector"].items() <= spec["nodeSelector"].items()
    assert spec["volumes"][: len(ours["volumes"])] == ours["volumes"]
    assert spec["tolerations"][: len(ours["tolerations"])] == ours["tolerations"]
    for field in ("labels", "annotations"):
        assert POD["metadata"][field].items() <= merged["metadata"][field].items()
    assert violations(merged) == []


@settings(deadline=None, max_examples=60)
@given(templates())
def test_merging_keeps_ours_and_is_idempotent(template: Manifest) -> None:
    before = copy.deepcopy(template)
    check_template(template, RULES)
    merged = merge_template(POD, template)
    check_ours_survives(merged)
    assert merge_template(merged, template) == merged
    assert template == before
    for name, value in template["metadata"].get("labels", {}).items():
        assert merged["metadata"]["labels"][name] == value
    sidecars = [container["name"] for container in template["spec"]["containers"] if container["name"] != "ray"]
    assert [container["name"] for container in merged["spec"]["containers"][1:]] == sidecars


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(damaged_templates() | junk, st.sampled_from([RULES, JOB_RULES]))
def test_any_template_is_merged_or_refused(template: Any, rules: Any) -> None:
    try:
        check_template(template, rules)
    except SpecError as error:
        for problem in error.problems:
            assert problem.path.startswith(rules.path)
            assert problem.rule
            assert problem.remedy
        return
    check_ours_survives(merge_template(merge_template(POD, template), template))


def spec_of(**fields: Any) -> Manifest:
    return {"spec": fields}


def ray(**fields: Any) -> Manifest:
    return spec_of(containers=[{"name": "ray", **fields}])


def sidecar(**fields: Any) -> Manifest:
    return spec_of(containers=[{"name": "log", "image": "log:1", **fields}])


def mount(path: str) -> Manifest:
    return {**ray(volumeMounts=[{"name": "c", "mountPath": path}])["spec"], "volumes": [{"name": "c", "emptyDir": {}}]}


REFUSED: list[tuple[Any, str]] = [
    ([], ""),
    ({"status": {}}, ".status"),
    ({"root": None}, ".root"),
    ({"metadata": {"name": "x"}}, ".metadata.name"),
    ({"metadata": {"labels": {"shardyard.dev/job": "x"}}}, ".metadata.labels.shardyard.dev/job"),
    ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "x"}}}, ".metadata.labels.kueue.x-k8s.io/queue-name"),
    ({"metadata": {"labels": {"team": "a b"}}}, ".metadata.labels.team"),
    ({"metadata": {"annotations": {"a": "ä" * 100_000}}}, ".metadata.annotations"),
    ({"metadata": {"annotations": {"ray.io/overwrite-container-cmd": "true"}}},
     ".metadata.annotations.ray.io/overwrite-container-cmd"),
    (spec_of(hostPID=True), ".spec.hostPID"),
    (spec_of(hostNetwork=True), ".spec.hostNetwork"),
    (spec_of(serviceAccountName="x"), ".spec.serviceAccountName"),
    (spec_of(automountServiceAccountToken=True), ".spec.automountServiceAccountToken"),
    (spec_of(terminationGracePeriodSeconds=1), ".spec.terminationGracePeriodSeconds"),
    (spec_of(securityContext={"runAsUser": 0}), ".spec.securityContext.runAsUser"),
    (spec_of(securityContext={"runAsUser": 2000}), ".spec.securityContext.runAsUser"),
    (spec_of(securityContext={"runAsNonRoot": False}), ".spec.securityContext.runAsNonRoot"),
    (spec_of(securityContext={"seccompProfile": {"type": "Unconfined"}}), ".spec.securityContext.seccompProfile"),
    (spec_of(nodeSelector={"gpu": "a100"}), ".spec.nodeSelector.gpu"),
    (spec_of(priorityClassName="system-node-critical"), ".spec.priorityClassName"),
    (spec_of(volumes=[{"name": "c", "hostPath": {"path": "/"}}]), ".spec.volumes[0].hostPath"),
    (spec_of(volumes=[{"name": "tmp", "emptyDir": {}}]), ".spec.volumes[0].name"),
    (spec_of(volumes=[{"name": "c", "emptyDir": {}, "secret": {"secretName": "s"}}]), ".spec.volumes[0]"),
    (spec_of(volumes=[{"name": "c", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
     ".spec.volumes[0].projected.sources[0].serviceAccountToken"),
    (spec_of(volumes=[{"name": "c", "projected": {"sources": [{"podCertificate": {
        "signerName": "kubernetes.io/kube-apiserver-client-pod", "keyType": "ED25519"}}]}}]),
     ".spec.volumes[0].projected.sources[0].podCertificate"),
    (spec_of(volumes=[{"name": "c", "projected": {"sources": [{"serviceAccountToken": {
        "audience": "https://kubernetes.default.svc.cluster.local", "path": "t"}}]}}]),
     ".spec.volumes[0].projected.sources[0].serviceAccountToken"),
    (ray(env=[{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "tmp", "path": "x", "key": "k"}}}]),
     ".spec.containers[0].env[0].valueFrom.fileKeyRef"),
    (ray(volumeMounts=[{"name": "storage", "mountPath": "/c", "subPath": "../state"}]),
     ".spec.containers[0].volumeMounts[0].subPath"),
    (spec_of(securityContext={"supplementalGroups": [0]}), ".spec.securityContext.supplementalGroups[0]"),
    (ray(securityContext={"allowPrivilegeEscalation": 0}),
     ".spec.containers[0].securityContext.allowPrivilegeEscalation"),
    ({"spec": mount("/storage")}, ".spec.containers[0].volumeMounts[0].mountPath"),
    ({"spec": mount("/storage/jobs/../jobs")}, ".spec.containers[0].volumeMounts[0].mountPath"),
    ({"spec": mount("//tmp/x")}, ".spec.containers[0].volumeMounts[0].mountPath"),
    ({"spec": mount("/dev")}, ".spec.containers[0].volumeMounts[0].mountPath"),
    ({"spec": mount("/")}, ".spec.containers[0].volumeMounts[0].mountPath"),
    (ray(volumeMounts=[{"name": "absent", "mountPath": "/c"}]), ".spec.containers[0].volumeMounts[0].name"),
    (ray(env=[{"name": "HOME", "value": "/x"}]), ".spec.containers[0].env[0].name"),
    (ray(env=[{"name": "RAY_ADDRESS", "value": "x"}]), ".spec.containers[0].env[0].name"),
    (ray(env=[{"name": "A", "value": 1}]), ".spec.containers[0].env[0].value"),
    (ray(env=[{"name": "A"}, {"name": "A"}]), ".spec.containers[0].env[1].name"),
    (ray(command=["sh"]), ".spec.containers[0].command"),
    (ray(resources={"limits": {"cpu": "1"}}), ".spec.containers[0].resources"),
    (ray(lifecycle={}), ".spec.containers[0].lifecycle"),
    (ray(securityContext={"privileged": True}), ".spec.containers[0].securityContext.privileged"),
    (ray(securityContext={"readOnlyRootFilesystem": False}),
     ".spec.containers[0].securityContext.readOnlyRootFilesystem"),
    (ray(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
     ".spec.containers[0].securityContext.capabilities.add"),
    (sidecar(securityContext={"capabilities": {"drop": []}}),
     ".spec.containers[0].securityContext.capabilities.drop"),
    (spec_of(containers=[{"name": "ray-worker", "image": "x"}]), ".spec.containers[0].name"),
    (spec_of(initContainers=[{"name": "ray", "image": "x"}]), ".spec.initContainers[0].name"),
    (spec_of(containers=[{"name": "log"}]), ".spec.containers[0].image"),
    (sidecar(securityContext={"allowPrivilegeEscalation": True}),
     ".spec.containers[0].securityContext.allowPrivilegeEscalation"),
    (sidecar(resources={"limits": {"nvidia.com/gpu": "1"}}), ".spec.containers[0].resources.limits.nvidia.com/gpu"),
    (sidecar(ports=[{"containerPort": 1, "hostPort": 1}]), ".spec.containers[0].ports[0].hostPort"),
    (sidecar(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}}),
     ".spec.containers[0].livenessProbe.httpGet.host"),
    ({**sidecar(), "spec": {**sidecar()["spec"], "initContainers": [{"name": "log", "image": "x"}]}},
     ".spec.initContainers[0].name"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "path"), REFUSED, ids=[path or "list" for _, path in REFUSED])
def test_a_template_that_breaks_a_rule(template: Any, path: str) -> None:
    with expect_problem(ANY, RULES.path + path) as error:
        check_template(template, RULES)
    assert error.value.problems[0].remedy


def test_a_jobs_template_uses_listed_secrets_and_claims_only() -> None:
    template = spec_of(
        volumes=[
            {"name": "a", "secret": {"secretName": "api-token"}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "state"}},
            {"name": "c", "secret": {"secretName": "s"}},
            {"name": "d", "persistentVolumeClaim": {"claimName": "corpora"}},
            {"name": "e", "csi": {"driver": "secrets-store.csi.k8s.io"}},
            {"name": "f", "projected": {"sources": [{"secret": {"name": "api-token"}}]}},
        ],
        imagePullSecrets=[{"name": "api-token"}],
        containers=[
            {
                "name": "ray",
                "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "api-token", "key": "token"}}}],
                "envFrom": [{"secretRef": {"name": "api-token"}}],
            }
        ],
    )
    check_template(template, RULES)
    with pytest.raises(SpecError) as error:
        check_template(template, JOB_RULES)
    assert sorted(problem.path.removeprefix("resources.pod_template.spec.") for problem in error.value.problems) == [
        "containers[0].envFrom[0].secretRef.name",
        "containers[0].env[0].valueFrom.secretKeyRef.name",
        "imagePullSecrets[0].name",
        "volumes[0].secret.secretName",
        "volumes[1].persistentVolumeClaim.claimName",
        "volumes[4].csi",
        "volumes[5].projected.sources[0].secret.name",
    ]


def test_a_job_leaves_the_operators_containers_volumes_and_mounts_alone() -> None:
    operators = {
        "spec": {
            "volumes": [{"name": "corpora", "persistentVolumeClaim": {"claimName": "corpora"}}],
            "containers": [
                {"name": "ray", "volumeMounts": [{"name": "corpora", "mountPath": "/corpora"}]},
                {"name": "log", "image": "log:1"},
            ],
        }
    }
    rules = rules_for_job(launches.settings(pod_template=operators), CACHE)
    template = {
        "spec": {
            "volumes": [{"name": "corpora", "emptyDir": {}}],
            "containers": [
                {"name": "ray", "volumeMounts": [{"name": "corpora", "mountPath": "/corpora/mine"}]},
                {"name": "log", "image": "mine:1"},
            ],
        }
    }
    with pytest.raises(SpecError) as error:
        check_template(template, rules)
    assert sorted(problem.path.removeprefix("resources.pod_template.spec.") for problem in error.value.problems) == [
        "containers[0].volumeMounts[0].mountPath",
        "containers[0].volumeMounts[0].name",
        "containers[1].name",
        "volumes[0].name",
    ]


OPERATORS: Manifest = {
    "metadata": {"labels": {"tenant": "a"}},
    "spec": {
        "affinity": {"nodeAffinity": {}},
        "nodeSelector": {"tenant": "a"},
        "schedulerName": "volcano",
        "volumes": [{"name": "vault", "secret": {"secretName": "vault"}}],
        "containers": [{"name": "log", "image": "log:1", "volumeMounts": [{"name": "vault", "mountPath": "/vault"}]}],
    },
}

REFUSED_TO_JOBS: list[tuple[Any, str]] = [
    # Another network, a cloud identity, a policy that allows more: all by a label or an annotation.
    ({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "default/host"}}},
     ".metadata.annotations.k8s.v1.cni.cncf.io/networks"),
    ({"metadata": {"labels": {"azure.workload.identity/use": "true"}}}, ".metadata.labels.azure.workload.identity/use"),
    ({"metadata": {"labels": {"tenant": "b"}}}, ".metadata.labels.tenant"),
    (ray(volumeMounts=[{"name": "vault", "mountPath": "/vault"}]), ".spec.containers[0].volumeMounts[0].name"),
    (spec_of(affinity={"podAffinity": {}}), ".spec.affinity"),
    (spec_of(nodeSelector={"tenant": "b"}), ".spec.nodeSelector.tenant"),
    (spec_of(schedulerName="default-scheduler"), ".spec.schedulerName"),
    (spec_of(runtimeClassName="runc"), ".spec.runtimeClassName"),
    (spec_of(securityContext={"supplementalGroups": [7]}), ".spec.securityContext.supplementalGroups"),
    (spec_of(volumes=[{"name": "c", "projected": {"sources": [{"serviceAccountToken": {"audience": "sts"}}]}}]),
     ".spec.volumes[0].projected.sources[0].serviceAccountToken"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "path"), REFUSED_TO_JOBS, ids=[path for _, path in REFUSED_TO_JOBS])
def test_a_jobs_template_gains_nothing_by_the_operators(template: Any, path: str) -> None:
    kuberay = launches.settings(
        launches.pool(runtime_class="gvisor"), pod_template=OPERATORS, template_keys=("team", "example.org/")
    )
    with expect_problem("not_allowed", JOB_TEMPLATE + path) as error:
        check_template(template, rules_for_job(kuberay, CACHE))
    assert error.value.problems[0].remedy
    keys = {"labels": {"team": "x"}, "annotations": {"example.org/cost": "y"}}
    check_template({"metadata": keys}, rules_for_job(kuberay, CACHE))


def test_the_hosts_network_where_every_pool_has_it() -> None:
    check_template(spec_of(hostNetwork=True), replace(RULES, host_network=True))
    assert rules_for_operator(launches.settings(launches.pool(host_network=True)), CACHE).host_network
    mixed = launches.settings(launches.pool("a", host_network=True), launches.pool("b"))
    assert not rules_for_operator(mixed, CACHE).host_network


def test_references_of_yaml_do_not_explode() -> None:
    level: list[Any] = ["x"] * 10
    for _ in range(10):
        level = [level] * 10
    cycle: Manifest = {}
    cycle["spec"] = cycle
    for template in (spec_of(affinity={"a": level}), cycle):
        with pytest.raises(SpecError) as error:
            check_template(template, RULES)
        (problem,) = error.value.problems
        assert problem.code == "too_large"


def test_the_documented_template_is_accepted() -> None:
    section = (ROOT / "docs" / "jobs.md").read_text().partition("## On Kubernetes")[2]
    fields = yaml.safe_load(section.partition("```yaml")[2].partition("```")[0])["resources"]
    spec = ResourcesSpec(**fields)
    kuberay = launches.settings(launches.pool(), allow_pod_templates=True, queue="research", queues=("team",),
                                template_keys=("team",))  # fmt: skip
    check_jobs_template(spec.pod_template, kuberay, CACHE)
    with expect_problem("not_allowed", "resources.pod_template"):
        check_jobs_template(spec.pod_template, launches.settings(), CACHE)
