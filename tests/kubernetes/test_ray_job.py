"""RayJobs of launches: as KubeRay's definition, Pod Security and KubeRay's own validation accept them."""

import re
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from moe.spec import SpecError
from service.control.launcher.kuberay.facts import QUEUE_LABEL
from service.control.launcher.kuberay.names import (
    MAX_NAME_LENGTH,
    SUBMISSION_ANNOTATION,
    label_value,
    ray_job_name,
    submission_labels,
)
from service.control.launcher.kuberay.ray_job import PRICE_ANNOTATION, PRIORITY_LABEL, build_ray_job
from service.control.launcher.launcher import LaunchRefusal
from service.quantities import parse_quantity
from tests.deploy.deployment import ROOT
from tests.kubernetes.api_server import CRDS
from tests.kubernetes.apiserver.definitions import custom_definitions
from tests.kubernetes.apiserver.schema import Schema, complete, errors, unknown_fields
from tests.kubernetes.conftest import require_definitions
from tests.kubernetes.launches import LAUNCH_PATH, kuberay_settings, launch, launches_on, pool, settings
from tests.kubernetes.pod_security import violations
from tests.kubernetes.templates import templates

KUBERNETES_VERSION = "1.32"
STANDING_CLUSTER = ROOT / "k8s" / "components" / "standing-cluster" / "ray-cluster.yaml"
Manifest = dict[str, Any]


@cache
def ray_job_schema() -> Schema:
    require_definitions()
    manifest = yaml.load((CRDS / "ray.io_rayjobs.yaml").read_text(), Loader=yaml.CSafeLoader)
    (definition,) = [d for d in custom_definitions(manifest) if d.version == "v1"]
    return definition.schema


def pod_templates(ray_job: Manifest) -> list[Manifest]:
    cluster = ray_job["spec"]["rayClusterSpec"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def worker_group(ray_job: Manifest) -> Manifest:
    (group,) = ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return group


def check_accepted(ray_job: Manifest) -> None:
    """Assert what an API server, Pod Security and the operator check."""
    schema = ray_job_schema()
    assert unknown_fields(schema, ray_job) == []
    assert errors(schema, complete(schema, ray_job)) == []
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", ray_job["metadata"]["name"])
    assert len(ray_job["metadata"]["name"]) <= MAX_NAME_LENGTH
    for template in pod_templates(ray_job):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {**template["metadata"], "name": "pod"}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
        assert violations(template) == []
        resources = template["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"], "the pod has the class Guaranteed"
    # ValidateRayJobSpec of KubeRay 1.7.
    spec = ray_job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True, "only such a RayJob can be suspended"
    assert spec["backoffLimit"] == 0
    assert spec["rayClusterSpec"]["rayVersion"], "token authentication requires it"


@hypothesis_settings(deadline=None, max_examples=10)
@given(st.data())
def test_any_ray_job_is_accepted(data: st.DataObject) -> None:
    template = data.draw(templates())
    kuberay = data.draw(kuberay_settings(pod_template=template, allow_pod_templates=True))
    ray_job = build_ray_job(data.draw(launches_on(kuberay)), LAUNCH_PATH, kuberay)
    check_accepted(ray_job)
    group = worker_group(ray_job)
    container = group["template"]["spec"]["containers"][0]
    node_pool = next(node_pool for node_pool in kuberay.pools if node_pool.name == group["groupName"])
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] <= node_pool.nodes
    assert parse_quantity(container["resources"]["limits"]["cpu"]) <= node_pool.cpus_per_node
    assert parse_quantity(container["resources"]["limits"]["memory"]) <= node_pool.memory
    gpus = int(container["resources"]["limits"].get(node_pool.gpu_resource, "0"))
    assert int(group["rayStartParams"]["num-gpus"]) == gpus <= node_pool.gpus_per_node
    assert ray_job["spec"]["suspend"] == (QUEUE_LABEL in ray_job["metadata"]["labels"]) == bool(kuberay.queue)


def test_pods_are_secured_as_the_standing_clusters() -> None:
    ray_job = build_ray_job(launch(), LAUNCH_PATH, settings(token_secret="ray-token"))
    standing = yaml.safe_load(STANDING_CLUSTER.read_text())["spec"]
    standing_templates = [standing["headGroupSpec"]["template"], standing["workerGroupSpecs"][0]["template"]]
    for ours, theirs in zip(pod_templates(ray_job), standing_templates, strict=True):
        for field in ("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "securityContext"):
            assert ours["spec"][field] == theirs["spec"][field]
        (our_container,), (their_container,) = ours["spec"]["containers"], theirs["spec"]["containers"]
        for field in ("name", "env", "ports", "securityContext"):
            assert our_container[field] == their_container[field]
        label = "app.kubernetes.io/component"
        assert ours["metadata"]["labels"][label] == theirs["metadata"]["labels"][label], "network policies select it"
    cluster = ray_job["spec"]["rayClusterSpec"]
    for field in ("rayVersion", "authOptions", "enableInTreeAutoscaling"):
        assert cluster[field] == standing[field]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_a_node_is_one_pod() -> None:
    group = worker_group(build_ray_job(launch(16), LAUNCH_PATH, settings()))
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (group["replicas"], limits) == (2, {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"})
    assert group["rayStartParams"] == {"num-cpus": "64", "num-gpus": "8"}
    volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "128Gi"}
    small = worker_group(build_ray_job(launch(2), LAUNCH_PATH, settings()))["template"]["spec"]["containers"][0]
    assert small["resources"]["limits"] == {"cpu": "16", "memory": "128Gi", "nvidia.com/gpu": "2"}


def test_networks_of_a_pool() -> None:
    rdma = pool(resources={"rdma/hca_shared_devices_a": "1"}, host_network=True, lock_memory=True, config_map="nccl",
                annotations={"k8s.v1.cni.cncf.io/networks": "sriov"}, runtime_class="nvidia",
                topology="example.org/block", node_price_per_hour=80)  # fmt: skip
    ray_job = build_ray_job(launch(2), LAUNCH_PATH, settings(rdma, queue="team", priority_class="high"))
    head, worker = pod_templates(ray_job)
    assert (worker["spec"]["hostNetwork"], worker["spec"]["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert worker["spec"]["runtimeClassName"] == "nvidia"
    (container,) = worker["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8", "two pods' ports would collide on one node"
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["envFrom"] == [{"configMapRef": {"name": "nccl", "optional": True}}]
    annotations = worker["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == "sriov"
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == "example.org/block"
    assert "hostNetwork" not in head["spec"]
    labels = ray_job["metadata"]["labels"]
    assert (labels[QUEUE_LABEL], labels[PRIORITY_LABEL]) == ("team", "high")
    assert ray_job["metadata"]["annotations"][PRICE_ANNOTATION] == "80.00"


def test_a_jobs_queue_and_template_come_after_the_operators() -> None:
    template = {"spec": {"containers": [{"name": "ray", "image": "mine:1", "env": [{"name": "A", "value": "job"}]}]}}
    kuberay = settings(
        queue="team",
        queues=("other",),
        allow_pod_templates=True,
        pod_template={"spec": {"containers": [{"name": "ray", "env": [{"name": "A", "value": "operator"}]}]}},
    )
    resources = {"queue": "other", "priority": "low", "pod_template": template}
    ray_job = build_ray_job(launch(resources=resources), LAUNCH_PATH, kuberay)
    assert ray_job["metadata"]["labels"][QUEUE_LABEL] == "other"
    assert ray_job["metadata"]["labels"][PRIORITY_LABEL] == "low"
    for pod in pod_templates(ray_job):
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "mine:1"
        assert {"name": "A", "value": "job"} in container["env"]
    bad = {"spec": {"hostPID": True}}
    with pytest.raises(SpecError) as error:
        build_ray_job(launch(resources={"pod_template": bad}), LAUNCH_PATH, kuberay)
    assert [problem.path for problem in error.value.problems] == ["resources.pod_template.spec.hostPID"]


def test_too_large_a_gang_is_refused() -> None:
    with pytest.raises(LaunchRefusal, match=r"33 workers.*h100 32"):
        build_ray_job(launch(33), LAUNCH_PATH, settings())


@given(st.text(min_size=1, max_size=100))
def test_names_and_labels_of_any_submission(submission_id: str) -> None:
    name = ray_job_name(submission_id)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= MAX_NAME_LENGTH
    value = label_value(submission_id)
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)


@given(st.lists(st.from_regex(r"[a-zA-Z0-9._-]{1,70}-a[1-9][0-9]{0,5}", fullmatch=True), unique=True, max_size=50))
def test_names_tell_submissions_apart(submission_ids: list[str]) -> None:
    assert len({ray_job_name(submission_id) for submission_id in submission_ids}) == len(submission_ids)
    labels = {tuple(submission_labels(submission_id).items()) for submission_id in submission_ids}
    assert len(labels) == len(submission_ids)


def test_objects_bear_the_submission() -> None:
    ray_job = build_ray_job(launch(), LAUNCH_PATH, settings(namespace="training"))
    assert ray_job["metadata"]["name"] == "shardyard-job-abcdefghijkl-1"
    assert ray_job["metadata"]["namespace"] == "training"
    for metadata in (ray_job["metadata"], *(pod["metadata"] for pod in pod_templates(ray_job))):
        assert submission_labels("job-abcdefghijkl-a1").items() <= metadata["labels"].items()
        assert metadata["annotations"][SUBMISSION_ANNOTATION] == "job-abcdefghijkl-a1"
    assert ray_job["spec"]["entrypoint"] == f"python -m service.run.driver {LAUNCH_PATH}"
