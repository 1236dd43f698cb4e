"""Resources that the service watches, and the fields of them that it reads."""

from dataclasses import dataclass, field

from service.control.kubernetes.prune import FieldTree
from service.control.kubernetes.resource import EVENTS, PODS, RAY_CLUSTERS, RAY_JOBS, WORKLOADS, Object, Resource

SUBMISSION_LABEL = "shardyard.dev/submission"
SUBMISSION_ANNOTATION = "shardyard.dev/submission-id"
PART_OF = "app.kubernetes.io/part-of=shardyard"

_METADATA: FieldTree = {
    "name": None,
    "uid": None,
    "resourceVersion": None,
    "creationTimestamp": None,
    "deletionTimestamp": None,
    "labels": None,
    "annotations": {"shardyard.dev/job": None, "shardyard.dev/attempt": None, "shardyard.dev/submission-id": None},
    "ownerReferences": {"kind": None, "name": None, "uid": None},
}
_CONDITION: FieldTree = {"type": None, "status": None, "reason": None, "message": None, "lastTransitionTime": None}
_CONTAINER_STATE: FieldTree = {
    "waiting": {"reason": None, "message": None},
    "running": {},
    "terminated": {"reason": None, "message": None, "exitCode": None, "signal": None, "finishedAt": None},
}
_CONTAINER_STATUS: FieldTree = {
    "name": None,
    "ready": None,
    "restartCount": None,
    "state": _CONTAINER_STATE,
    "lastState": _CONTAINER_STATE,
}
_CONTAINER: FieldTree = {"name": None, "image": None, "resources": {"requests": None, "limits": None}}


@dataclass(frozen=True)
class WatchedResource:
    """A resource to mirror: which objects, and which of their fields."""

    resource: Resource
    fields: FieldTree = field(hash=False)
    label_selector: str = ""
    field_selector: str = ""
    most_per_object: int | None = None
    """For events: how many of one object stay, the newest."""


WATCHED = (
    WatchedResource(
        RAY_JOBS,
        {
            "metadata": {**_METADATA, "annotations": {SUBMISSION_ANNOTATION: None}},
            "spec": {"suspend": None},
            "status": {
                "jobId": None,
                "jobStatus": None,
                "jobDeploymentStatus": None,
                "reason": None,
                "message": None,
                "startTime": None,
                "endTime": None,
                "failed": None,
                "succeeded": None,
                "rayClusterName": None,
                "dashboardURL": None,
                "observedGeneration": None,
            },
        },
        PART_OF,
    ),
    WatchedResource(
        RAY_CLUSTERS,
        {
            "metadata": _METADATA,
            "spec": {"suspend": None},
            "status": {
                "state": None,
                "reason": None,
                "conditions": _CONDITION,
                "desiredWorkerReplicas": None,
                "availableWorkerReplicas": None,
                "readyWorkerReplicas": None,
                "head": {"podIP": None, "podName": None, "serviceName": None},
            },
        },
        PART_OF,
    ),
    WatchedResource(
        PODS,
        {
            "metadata": _METADATA,
            "spec": {"nodeName": None, "containers": _CONTAINER, "initContainers": _CONTAINER},
            "status": {
                "phase": None,
                "reason": None,
                "message": None,
                "podIP": None,
                "conditions": {name: subtree for name, subtree in _CONDITION.items() if name != "lastTransitionTime"},
                "containerStatuses": _CONTAINER_STATUS,
                "initContainerStatuses": _CONTAINER_STATUS,
            },
        },
        PART_OF,
    ),
    WatchedResource(
        EVENTS,
        {
            "metadata": {"name": None, "uid": None, "resourceVersion": None, "creationTimestamp": None},
            "involvedObject": {"kind": None, "name": None, "uid": None},
            "type": None,
            "reason": None,
            "message": None,
            "count": None,
            "firstTimestamp": None,
            "lastTimestamp": None,
            "eventTime": None,
            "series": {"count": None, "lastObservedTime": None},
        },
        field_selector="type=Warning",
        most_per_object=8,
    ),
)
"""Every cluster's. The API server needs KubeRay's definitions."""

WATCHED_KUEUE = WatchedResource(
    WORKLOADS,
    {
        "metadata": _METADATA,
        "spec": {"queueName": None, "priority": None, "active": None},
        "status": {
            "conditions": _CONDITION,
            "admission": {"clusterQueue": None},
            "requeueState": None,
            "admissionChecks": {"name": None, "state": None, "message": None},
        },
    },
)
"""Workloads of Kueue, selected by their owner, since Kueue does not copy the labels of jobs to them."""


def submission_of(value: Object) -> str:
    """Value of the submission label; empty without one."""
    return str((value["metadata"].get("labels") or {}).get(SUBMISSION_LABEL, ""))
