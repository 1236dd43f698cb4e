"""Raw objects of an attempt as an API server returns them, with the parts of their status that a test names."""

from typing import Any

from service.control.launcher.kuberay.facts import (
    AttemptFacts,
    EventFacts,
    PodFacts,
    RayClusterFacts,
    RayJobFacts,
    WorkloadFacts,
)

CREATED, CREATED_S = "2026-12-01T12:00:00Z", 1_796_126_400.0
JOB, CLUSTER = "shardyard-j1-1", "shardyard-j1-1-xk2p9"
HEAD, WORKER = f"{CLUSTER}-head-aa", f"{CLUSTER}-workers-worker-bb"
IMAGE = "registry.example/shardyard:1.4"
NO_ROOM = "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, used: 56, limited: 60'
DENIAL = 'admission webhook "policy.example" denied the request: images must come from registry.example'


def ray_job(
    deployment: str = "",
    job: str = "",
    *,
    queue: str = "",
    suspend: bool = False,
    is_deleting: bool = False,
    **status: Any,
) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    metadata = {"name": JOB, "creationTimestamp": CREATED, "labels": labels}
    if is_deleting:
        metadata["deletionTimestamp"] = CREATED
    stati = {"jobDeploymentStatus": deployment, "jobStatus": job, **status}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": {k: v for k, v in stati.items() if v}}


def ray_failure(code: int, output: str = "") -> str:
    tail = f", last available logs (truncated to 20,000 chars):\n{output}" if output else ". No logs available."
    return f"Job entrypoint command failed with exit code {code}{tail}"


def ray_cluster(state: str = "", *conditions: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": CLUSTER}, "status": {"state": state, "conditions": list(conditions)}}


def condition(type: str, status: str = "True", reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": type, "status": status, "reason": reason, "message": message}


READY = condition("Ready")


def pod(
    name: str,
    *conditions: dict[str, str],
    node: str = "",
    container: dict[str, Any] | None = None,
    init: dict[str, Any] | None = None,
    is_deleting: bool = False,
    **status: Any,
) -> dict[str, Any]:
    """A pod, the head if its name says so. `container`, `init`: status of its container or init container."""
    is_head = "head" in name
    metadata: dict[str, Any] = {"name": name, "labels": {"ray.io/node-type": "head" if is_head else "worker"}}
    if is_deleting:
        metadata["deletionTimestamp"] = CREATED
    container_name = "ray-head" if is_head else "ray-worker"
    spec: dict[str, Any] = {
        "containers": [{"name": container_name, "image": IMAGE, "resources": {"limits": {"memory": "64Gi"}}}]
    }
    if node:
        spec["nodeName"] = node
    fields: dict[str, Any] = {"phase": "Running" if READY in conditions else "Pending", "conditions": list(conditions)}
    fields["containerStatuses"] = [{"name": container_name, "ready": READY in conditions, **(container or {})}]
    if init is not None:
        spec["initContainers"] = [{"name": "wait-gcs-ready", "image": IMAGE}]
        fields["initContainerStatuses"] = [{"name": "wait-gcs-ready", **init}]
    return {"metadata": metadata, "spec": spec, "status": {**fields, **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def ended(exit_code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}}


def event(kind: str, name: str, reason: str, message: str, at: str = CREATED) -> dict[str, Any]:
    return {
        "involvedObject": {"kind": kind, "name": name},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


def workload(
    *conditions: dict[str, str], active: bool = True, checks: list[dict[str, str]] | None = None
) -> dict[str, Any]:
    spec = {"queueName": "gpus", "active": active}
    status = {"conditions": list(conditions), "admissionChecks": checks or []}
    return {"metadata": {"name": f"rayjob-{JOB}"}, "spec": spec, "status": status}


def facts(
    job: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    pods: tuple[dict[str, Any], ...] = (),
    events: tuple[dict[str, Any], ...] = (),
    work: dict[str, Any] | None = None,
    after_s: float = 5.0,
    was_seen: bool = False,
) -> AttemptFacts:
    """Facts parsed from raw objects, `after_s` after the RayJob's creation."""
    return AttemptFacts(
        now_s=CREATED_S + after_s,
        ray_job=None if job is None else RayJobFacts.parse(job),
        ray_cluster=None if cluster is None else RayClusterFacts.parse(cluster),
        pods=tuple(map(PodFacts.parse, pods)),
        events=tuple(map(EventFacts.parse, events)),
        workload=None if work is None else WorkloadFacts.parse(work),
        was_seen=was_seen,
    )
