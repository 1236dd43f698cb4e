"""RayJob of one attempt: KubeRay's description of its cluster and driver."""

import shlex
from typing import Any

from service.control.launcher.kuberay.facts import QUEUE_LABEL
from service.control.launcher.kuberay.names import INSTANCE_LABEL, SUBMISSION_ANNOTATION, object_labels, ray_job_name
from service.control.launcher.kuberay.pods import PodMaker
from service.control.launcher.kuberay.pools import WorkerPods, choose_pool, worker_pods
from service.kuberay_settings import KubeRaySettings
from service.wire.launch import Launch

API_VERSION = "ray.io/v1"
RAY_VERSION = "2.60.0"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
NAME_ANNOTATION = "shardyard.dev/name"
OWNER_ANNOTATION = "shardyard.dev/owner"
POOL_ANNOTATION = "shardyard.dev/pool"
PRICE_ANNOTATION = "shardyard.dev/price-per-hour"

Manifest = dict[str, Any]


def build_ray_job(launch: Launch, launch_path: str, settings: KubeRaySettings) -> Manifest:
    """RayJob that runs the driver of this attempt on a RayCluster of its own.

    A job with a queue is created suspended and started by Kueue, so an existing RayJob must not be applied again.
    Raises LaunchRefusal if no node pool holds the workers, SpecError for a pod template that breaks a rule.
    """
    resources = launch.spec.resources
    gang = launch.plan.num_workers, resources.cpus_per_worker, launch.gpus_per_worker
    pods = worker_pods(choose_pool(settings.job_pools, launch.pool, *gang), *gang)
    queue = resources.queue or settings.queue
    labels = object_labels(launch.job_id, launch.attempt, launch.submission_id)
    maker = PodMaker(
        settings,
        labels=labels,
        submission_id=launch.submission_id,
        cache=launch.cache,
        job_template=resources.pod_template,
        topology=bool(queue),
    )
    further_labels = {INSTANCE_LABEL: launch.instance}
    if queue:
        further_labels |= {QUEUE_LABEL: queue, PRIORITY_LABEL: resources.priority or settings.priority_class}
    metadata = {
        "name": ray_job_name(launch.submission_id),
        "labels": {**labels, **{name: value for name, value in further_labels.items() if value}},
        "annotations": _annotations(launch, pods),
    }
    driver = shlex.join([settings.python, "-m", "service.run.driver", launch_path])
    submission = {
        "entrypoint": driver,
        "jobId": launch.submission_id,
        "metadata": {"shardyard_job": launch.job_id, "name": launch.spec.name},
        "suspend": bool(queue),
    }
    return _ray_job(settings, metadata, submission, cluster_spec(settings, maker, pods))


def sample_ray_job(settings: KubeRaySettings, cache: str) -> Manifest:
    """RayJob of one worker, to be checked by an API server and not stored. Raises SpecError for an operator's pod
    template that breaks a rule."""
    pool = settings.job_pools[0]
    submission_id = "preflight-a1"
    labels = object_labels("preflight", 1, submission_id)
    maker = PodMaker(settings, labels=labels, submission_id=submission_id, cache=cache, topology=bool(settings.queue))
    metadata = {"name": ray_job_name(submission_id), "labels": labels}
    submission = {"entrypoint": "true", "jobId": submission_id, "suspend": True}
    pods = worker_pods(pool, 1, 1, min(1, pool.gpus_per_node))
    return _ray_job(settings, metadata, submission, cluster_spec(settings, maker, pods))


def _ray_job(settings: KubeRaySettings, metadata: Manifest, submission: Manifest, cluster: Manifest) -> Manifest:
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "RayJob",
        "metadata": {**metadata, **namespace},
        "spec": {
            **submission,
            # KubeRay posts the driver to the head's dashboard. A submitter Job would be a second pod with the image for
            # each job; a submitter beside the head has no security context that `restricted` admits, and ends the job
            # when its own connection to the head breaks.
            "submissionMode": "HTTPMode",
            "entrypointNumCpus": 0,  # the driver only waits; its workers hold the CPUs
            "backoffLimit": 0,  # the control plane starts the next attempt
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": settings.ttl_s,
            "rayClusterSpec": cluster,
        },
    }


def cluster_spec(settings: KubeRaySettings, maker: PodMaker, pods: WorkerPods) -> Manifest:
    """RayClusterSpec of a head and one worker group."""
    auth = {"mode": "token", **({"secretName": settings.token_secret} if settings.token_secret else {})}
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": auth,
        # The plan is made for a number of workers: nothing may change it while they train.
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "serviceType": "ClusterIP",
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": maker.make_head(),
        },
        "workerGroupSpecs": [
            {
                "groupName": pods.pool.name,
                "replicas": pods.num_pods,
                "minReplicas": pods.num_pods,
                "maxReplicas": pods.num_pods,
                "rayStartParams": {"num-cpus": str(int(pods.cpus)), "num-gpus": str(pods.gpus)},
                "template": maker.make_worker(pods),
            }
        ],
    }


def _annotations(launch: Launch, pods: WorkerPods) -> dict[str, str]:
    annotations = {
        SUBMISSION_ANNOTATION: launch.submission_id,
        NAME_ANNOTATION: launch.spec.name,
        OWNER_ANNOTATION: launch.owner,
        POOL_ANNOTATION: pods.pool.name,
    }
    if pods.price_per_hour is not None:
        annotations[PRICE_ANNOTATION] = f"{pods.price_per_hour:.2f}"
    return annotations
