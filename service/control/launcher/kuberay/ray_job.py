"""RayJob of one attempt: KubeRay's description of its cluster and driver."""

import shlex
from typing import Any

from service.control.launcher.kuberay.names import SUBMISSION_ANNOTATION, object_labels, ray_job_name
from service.control.launcher.kuberay.pools import WorkerPods, choose_pool, worker_pods
from service.kuberay_settings import KubeRaySettings
from service.quantities import format_bytes, format_cores
from service.wire.launch import Launch

API_VERSION = "ray.io/v1"
RAY_VERSION = "2.60.0"
USER_ID = 1000
HEAD_COMPONENT, WORKER_COMPONENT = "ray-head", "ray-worker"
"""Values of `app.kubernetes.io/component`, by which network policies select pods; also the containers' names."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"

Manifest = dict[str, Any]


def build_ray_job(launch: Launch, launch_path: str, settings: KubeRaySettings) -> Manifest:
    """RayJob that runs the driver of this attempt on a RayCluster of its own.

    A job with a queue is created suspended and started by Kueue, so an existing RayJob must not be applied again.
    Raises LaunchRefusal if no node pool holds the workers.
    """
    resources = launch.spec.resources
    gang = launch.plan.num_workers, resources.cpus_per_worker, launch.gpus_per_worker
    pods = worker_pods(choose_pool(settings.pools, launch.pool, *gang), *gang)
    queue = resources.queue or settings.queue
    priority = resources.priority or settings.priority_class
    labels = object_labels(launch.job_id, launch.attempt, launch.submission_id)
    kueue_labels = {QUEUE_LABEL: queue, PRIORITY_LABEL: priority} if queue else {}
    annotations = {
        SUBMISSION_ANNOTATION: launch.submission_id,
        "shardyard.dev/name": launch.spec.name,
        "shardyard.dev/pool": pods.pool.name,
    }
    if pods.price_per_hour is not None:
        annotations["shardyard.dev/price-per-hour"] = f"{pods.price_per_hour:.2f}"
    return {
        "apiVersion": API_VERSION,
        "kind": "RayJob",
        "metadata": {
            "name": ray_job_name(launch.submission_id),
            **({"namespace": settings.namespace} if settings.namespace else {}),
            "labels": {**labels, **{name: value for name, value in kueue_labels.items() if value}},
            "annotations": annotations,
        },
        "spec": {
            # KubeRay posts the driver to the head's dashboard. A submitter Job would be a second pod with the image for
            # each job; a submitter beside the head has no security context that `restricted` admits, and ends the job
            # when its own connection to the head breaks.
            "submissionMode": "HTTPMode",
            "entrypoint": shlex.join([settings.python, "-m", "service.run.driver", launch_path]),
            "entrypointNumCpus": 0,  # the driver only waits; its workers hold the CPUs
            "jobId": launch.submission_id,
            "metadata": {"shardyard_job": launch.job_id, "name": launch.spec.name},
            "suspend": bool(queue),
            "backoffLimit": 0,  # the control plane starts the next attempt
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": settings.ttl_s,
            "rayClusterSpec": _cluster_spec(settings, pods, labels, annotations),
        },
    }


def _cluster_spec(settings: KubeRaySettings, pods: WorkerPods, labels: Manifest, annotations: Manifest) -> Manifest:
    auth = {"mode": "token", **({"secretName": settings.token_secret} if settings.token_secret else {})}
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": auth,
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": {"metadata": _pod_metadata(labels, annotations, HEAD_COMPONENT), "spec": _head_pod(settings)},
        },
        "workerGroupSpecs": [
            {
                "groupName": pods.pool.name,
                "replicas": pods.num_pods,
                "minReplicas": pods.num_pods,
                "maxReplicas": pods.num_pods,
                "rayStartParams": {"num-cpus": str(int(pods.cpus)), "num-gpus": str(pods.gpus)},
                "template": {
                    "metadata": _pod_metadata(labels, annotations, WORKER_COMPONENT),
                    "spec": _worker_pod(settings, pods),
                },
            }
        ],
    }


def _pod_metadata(labels: Manifest, annotations: Manifest, component: str) -> Manifest:
    submission = {SUBMISSION_ANNOTATION: annotations[SUBMISSION_ANNOTATION]}
    return {"labels": {**labels, "app.kubernetes.io/component": component}, "annotations": submission}


def _head_pod(settings: KubeRaySettings) -> Manifest:
    amounts = {"cpu": format_cores(settings.head_cpus), "memory": format_bytes(settings.head_memory)}
    ports = [{"name": "gcs-server", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265}]
    pod = _pod(settings, HEAD_COMPONENT, amounts, settings.head_memory // 4)
    pod["containers"][0]["ports"] = ports
    if settings.head_node_selector:
        pod["nodeSelector"] = dict(settings.head_node_selector)
    return pod


def _worker_pod(settings: KubeRaySettings, pods: WorkerPods) -> Manifest:
    pool = pods.pool
    amounts = {"cpu": format_cores(pods.cpus), "memory": format_bytes(pods.memory_bytes), **pool.resources}
    if pods.gpus:
        amounts[pool.gpu_resource] = str(pods.gpus)
    pod = _pod(settings, WORKER_COMPONENT, amounts, pods.shared_memory_bytes)
    if pool.node_selector:
        pod["nodeSelector"] = dict(pool.node_selector)
    if pool.tolerations:
        pod["tolerations"] = [toleration.to_manifest() for toleration in pool.tolerations]
    return pod


def _pod(settings: KubeRaySettings, name: str, amounts: dict[str, str], shared_memory_bytes: int) -> Manifest:
    """Pod as Pod Security `restricted` admits it; KubeRay adds Ray's start and probes."""
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[Manifest] = [
        # Ray's session and logs, and records until they are sealed on the storage.
        {"name": "tmp", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": format_bytes(shared_memory_bytes)}},
    ]
    if settings.storage_claim:
        mounts.append({"name": "storage", "mountPath": settings.storage_path})
        volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": settings.storage_claim}})
    container: Manifest = {
        "name": name,
        "image": settings.image,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": dict(amounts), "limits": dict(amounts)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    return {
        "serviceAccountName": settings.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.termination_grace_s,
        # The control plane's own user, whose files for its drivers nobody else may read.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
