"""Memory and time of the control plane with 1,000 RayJobs and 20,000 pods: prints them and writes JSON.

    python -m benchmarks.kubernetes_watch [--jobs 1000] [--pods 20] [--changes 100] [--seconds 20]

The API server of the tests serves the objects, as KubeRay makes them, from another process. A third process imports
what the control plane imports, starts the launcher, and observes every job once a second while pods change.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results

MIB = 1024**2
LIMIT_MB = 250
LIMIT_S = 0.05
CREATED = "2026-12-01T12:00:00Z"
CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")

Object = dict[str, Any]


def metadata(name: str, labels: dict[str, str], owner: Object | None = None) -> Object:
    value: Object = {"name": name, "namespace": "shardyard", "uid": str(uuid.uuid4()), "creationTimestamp": CREATED}
    fields = {f"f:field-{index}": {".": {}, "f:a": {}, "f:b": {}} for index in range(40)}
    manager = {"manager": "kuberay-operator", "operation": "Update", "apiVersion": "v1", "time": CREATED}
    value |= {"labels": labels, "managedFields": [{**manager, "fieldsType": "FieldsV1", "fieldsV1": fields}]}
    if owner is not None:
        reference = {"apiVersion": "ray.io/v1", "kind": owner["kind"], "name": owner["metadata"]["name"]}
        reference |= {"uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
        value["ownerReferences"] = [reference]
    return value


def pod(name: str, labels: dict[str, str], owner: Object, *, node: str, restarts: int = 0) -> Object:
    """A running worker pod, as large as KubeRay and the kubelet make it (8 KB)."""
    variables = [{"name": f"RAY_VARIABLE_{index}", "value": f"value-{index}"} for index in range(30)]
    limits = {"cpu": "96", "memory": "960Gi", "nvidia.com/gpu": "8"}
    image = "registry.example/shardyard:1.4@sha256:" + "0" * 64
    container = {"name": "ray-worker", "image": image, "env": variables, "command": ["/bin/bash", "-c", "--"]}
    container["resources"] = {"limits": limits, "requests": limits}
    conditions = [
        {"type": t, "status": "True", "lastTransitionTime": CREATED, "lastProbeTime": None} for t in CONDITIONS
    ]
    status = {"name": "ray-worker", "ready": True, "started": True, "restartCount": restarts, "image": image}
    status |= {"imageID": image, "containerID": f"containerd://{uuid.uuid4().hex * 2}", "lastState": {}}
    status["state"] = {"running": {"startedAt": CREATED}}
    address = f"10.{hash(name) % 250}.{hash(node) % 250}.{restarts % 250}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(name, labels, owner),
        "spec": {"nodeName": node, "containers": [container], "restartPolicy": "Never", "tolerations": [{}] * 3},
        "status": {"phase": "Running", "conditions": conditions, "podIP": address, "containerStatuses": [status]},
    }


def cluster_objects(num_jobs: int, num_pods: int) -> tuple[list[Object], list[Object], list[Object], list[Object]]:
    """RayJobs, their clusters and pods, and a warning about every twentieth pod."""
    from service.control.launcher.kuberay.names import SUBMISSION_ANNOTATION, object_labels, ray_job_name

    jobs, clusters, pods, events = [], [], [], []
    for job_index in range(num_jobs):
        submission = f"job-{job_index:06d}-a1"
        labels = object_labels(f"job-{job_index:06d}", 1, submission)
        name = ray_job_name(submission)
        job: Object = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata(name, labels)}
        job["metadata"]["annotations"] = {SUBMISSION_ANNOTATION: submission}
        job["spec"] = {"entrypoint": "python -m service.run.driver", "suspend": False}
        job["status"] = {"jobId": submission, "jobStatus": "RUNNING", "jobDeploymentStatus": "Running"}
        job["status"] |= {
            "rayClusterName": f"{name}-xk2p9",
            "startTime": CREATED,
            "dashboardURL": f"{name}-head-svc:8265",
        }
        cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata(f"{name}-xk2p9", labels, job)}
        cluster |= {"spec": {}, "status": {"state": "ready", "readyWorkerReplicas": num_pods - 1}}
        jobs.append(job)
        clusters.append(cluster)
        for pod_index in range(num_pods):
            kind = "worker" if pod_index else "head"
            of_ray = {"ray.io/cluster": f"{name}-xk2p9", "ray.io/node-type": kind, "ray.io/group": f"{kind}s"}
            node = f"node-{(job_index * num_pods + pod_index) % 2500:04d}.internal"
            pods.append(pod(f"{name}-xk2p9-{kind}-{pod_index:05d}", labels | of_ray, cluster, node=node))
            if pod_index % 20 == 1:
                involved = {"kind": "Pod", "name": pods[-1]["metadata"]["name"], "uid": pods[-1]["metadata"]["uid"]}
                event = {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": metadata(f"{pods[-1]['metadata']['name']}.1", {}),
                }
                event |= {"involvedObject": involved, "type": "Warning", "reason": "FailedScheduling", "count": 3}
                events.append(event | {"message": "0/12 nodes are available: 12 Insufficient nvidia.com/gpu."})
    return jobs, clusters, pods, events


def observe_jobs(kubeconfig: Path, num_jobs: int, seconds: float) -> Object:
    """Figures of the process that watches; runs in a process of its own."""
    import structlog

    import service.control.app  # noqa: F401 - what the control plane imports
    from service.control.kubernetes import PODS, Connection, KubernetesApi
    from service.control.launcher.kuberay.launcher import KubeRayLauncher
    from service.kuberay_settings import KubeRaySettings

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    process = psutil.Process()
    before_mb = process.memory_info().rss / MIB
    started_at = time.monotonic()
    api = KubernetesApi(Connection.open(kubeconfig))
    client_mb = process.memory_info().rss / MIB
    launcher = KubeRayLauncher(api, KubeRaySettings())
    mirror = launcher._mirror
    while not (mirror.has_listed and mirror.in_sync):
        time.sleep(0.05)
    figures: Object = {
        "seconds_to_sync": time.monotonic() - started_at,
        "memory_mb_before": before_mb,
        "memory_mb_with_client": client_mb,
        "memory_mb_in_sync": process.memory_info().rss / MIB,
        "pods": len(mirror.all(PODS)),
    }
    print("in sync", flush=True)
    submissions = [f"job-{index:06d}-a1" for index in range(num_jobs)]
    times_s, processor_s = [], []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        step_at, processor_at = time.monotonic(), time.thread_time()
        assert all(launcher.observe(submission).status == "running" for submission in submissions)
        times_s.append(time.monotonic() - step_at)
        processor_s.append(time.thread_time() - processor_at)
        time.sleep(max(0.0, 1.0 - times_s[-1]))
    figures |= {
        "first_decision_s": times_s[0],
        "decision_s_median": sorted(times_s[1:])[len(times_s[1:]) // 2],
        "decision_s_longest": max(times_s[1:]),
        "decision_processor_s_median": sorted(processor_s[1:])[len(processor_s[1:]) // 2],
        "memory_mb_after": process.memory_info().rss / MIB,
    }
    launcher.close()
    return figures


def measure(num_jobs: int, num_pods: int, changes: int, seconds: float) -> Object:
    """Figures of one run."""
    from service.control.kubernetes import EVENTS, PODS, RAY_CLUSTERS, RAY_JOBS
    from tests.kubernetes.api_server import ApiServer

    jobs, clusters, pods, events = cluster_objects(num_jobs, num_pods)
    with tempfile.TemporaryDirectory() as folder, ApiServer(Path(folder), bookmark_s=60, persist=False) as server:
        for resource, objects in ((RAY_JOBS, jobs), (RAY_CLUSTERS, clusters), (PODS, pods), (EVENTS, events)):
            for start in range(0, len(objects), 500):
                server.load(resource, objects[start : start + 500])
        command = [sys.executable, "-m", "benchmarks.kubernetes_watch", "--child", str(server.kubeconfig())]
        command += ["--jobs", str(num_jobs), "--seconds", str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "in sync"
            first = [r["verb"] for r in server.requests()]
            server.forget_requests()
            changed = 0
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                batch = [pods[(changed + index) % len(pods)] for index in range(changes)]
                for value in batch:
                    value["status"]["containerStatuses"][0]["restartCount"] += 1
                server.load(PODS, batch)
                changed += len(batch)
                time.sleep(1.0)
            figures = json.loads(child.stdout.readline())
        later = [r["verb"] for r in server.requests()]
    sizes = {"rayjobs": num_jobs, "pods": len(pods), "pod_bytes": len(json.dumps(pods[0])), "changes_per_s": changes}
    return {
        **sizes,
        **figures,
        "requests_until_sync": {verb: first.count(verb) for verb in sorted(set(first))},
        "requests_while_watching": {verb: later.count(verb) for verb in sorted(set(later))},
        "changed_pods": changed,
        "limits": {"memory_mb": LIMIT_MB, "decision_s": LIMIT_S},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=20, help="pods of a job")
    parser.add_argument("--changes", type=int, default=100, help="pods that change in a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--child", type=Path, help="kubeconfig; used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(observe_jobs(arguments.child, arguments.jobs, arguments.seconds)), flush=True)
        return
    figures = measure(arguments.jobs, arguments.pods, arguments.changes, arguments.seconds)
    print(json.dumps(figures, indent=1))
    print(results.write("kubernetes_watch", figures))


if __name__ == "__main__":
    main()
