"""A stand-in for KubeRay's operator, Kueue and kubelets, moved by the test step by step.

A stand-in because a Kubernetes cluster cannot run here. It writes the objects and the status fields that KubeRay 1.7
and Kueue write, through the API server of the tests.
"""

from typing import Any

from service.control.kubernetes import PODS, RAY_CLUSTERS, RAY_JOBS, WORKLOADS
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.objects import Object, reference
from tests.kubernetes.resources import condition

READY = [condition("Ready")]


class Operator:
    """Acts on the RayJobs of one API server."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server

    def ray_jobs(self) -> dict[str, Object]:
        return self._server.objects(RAY_JOBS)

    def pods(self) -> dict[str, Object]:
        return self._server.objects(PODS)

    def start_cluster(self, name: str) -> None:
        """Create the RayCluster of a RayJob and its pods, which are not scheduled yet."""
        job = self._server.admin("GET", RAY_JOBS, name)
        spec = job["spec"]["rayClusterSpec"]
        metadata = {"name": f"{name}-xk2p9", "labels": job["metadata"]["labels"], "ownerReferences": [reference(job)]}
        cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
        self._server.admin("POST", RAY_CLUSTERS, body=cluster)
        self.create_pods(name)
        self.set_job(name, "Initializing", jobId=job["spec"].get("jobId", ""), rayClusterName=metadata["name"])

    def create_pods(self, name: str) -> None:
        """Create the pods of a RayJob's cluster that are missing."""
        cluster = self._server.admin("GET", RAY_CLUSTERS, f"{name}-xk2p9")
        spec, present = cluster["spec"], self.pods()
        groups = [("head", 1, spec["headGroupSpec"]["template"])]
        groups += [("worker", group["replicas"], group["template"]) for group in spec["workerGroupSpecs"]]
        for node_type, num_pods, template in groups:
            for index in range(num_pods):
                pod_name = f"{name}-{node_type}-{index}"
                if pod_name in present:
                    continue
                labels = {**template["metadata"]["labels"], "ray.io/node-type": node_type}
                metadata = {"name": pod_name, "labels": labels, "ownerReferences": [reference(cluster)]}
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
                self._server.admin("POST", PODS, body=pod)

    def run(self, name: str) -> None:
        """Have the pods ready and the driver running."""
        for pod_name, pod in self.pods().items():
            if pod_name.startswith(f"{name}-"):
                self._server.set_status(PODS, pod["metadata"]["name"], {"phase": "Running", "conditions": READY})
        self._server.set_status(RAY_CLUSTERS, f"{name}-xk2p9", {"state": "ready"})
        self.set_job(name, "Running", "RUNNING", dashboardURL=f"{name}-head-svc.shardyard.svc.cluster.local:8265")

    def end(self, name: str, job_status: str = "SUCCEEDED", message: str = "", reason: str = "") -> None:
        deployment = "Failed" if job_status == "FAILED" else "Complete"
        self.set_job(name, deployment, job_status, message=message, reason=reason)

    def finish_suspension(self, name: str) -> None:
        """Delete the cluster of a suspended RayJob."""
        if f"{name}-xk2p9" in self._server.objects(RAY_CLUSTERS):
            self._server.admin("DELETE", RAY_CLUSTERS, f"{name}-xk2p9")
        self.set_job(name, "Suspended", "", message="", dashboardURL="")

    def set_job(self, name: str, deployment: str, job: str = "", **status: Any) -> None:
        self._server.set_status(RAY_JOBS, name, {"jobDeploymentStatus": deployment, "jobStatus": job, **status})

    def queue(self, name: str, message: str) -> None:
        """Have Kueue make the Workload of a suspended RayJob, which waits."""
        job = self._server.admin("GET", RAY_JOBS, name)
        metadata = {"name": f"rayjob-{name}", "ownerReferences": [reference(job)]}
        pod_sets = [
            {"name": "head", "count": 1, "template": job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]}
        ]
        spec = {"queueName": job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "podSets": pod_sets}
        workload = {"apiVersion": WORKLOADS.api_version, "kind": "Workload", "metadata": metadata, "spec": spec}
        self._server.admin("POST", WORKLOADS, body=workload)
        self.set_workload(name, condition("QuotaReserved", "False", "Pending", message))
        self.set_job(name, "Suspended")

    def admit(self, name: str) -> None:
        """Have Kueue start a queued RayJob."""
        self.set_workload(
            name, condition("QuotaReserved", reason="QuotaReserved"), condition("Admitted", reason="Admitted")
        )
        self._server.admin(
            "PATCH", RAY_JOBS, name, {"spec": {"suspend": False}}, content_type="application/merge-patch+json"
        )

    def evict(self, name: str, reason: str, message: str) -> None:
        """Have Kueue evict a RayJob; its cluster is deleted later."""
        self.set_workload(name, condition("Evicted", "True", reason, message))
        self._server.admin(
            "PATCH", RAY_JOBS, name, {"spec": {"suspend": True}}, content_type="application/merge-patch+json"
        )
        self.set_job(name, "Suspending")

    def set_workload(self, name: str, *conditions: dict[str, str]) -> None:
        timed = [
            {**entry, "lastTransitionTime": "2026-12-01T12:00:00Z", "reason": entry["reason"] or "Set"}
            for entry in conditions
        ]
        self._server.set_status(WORKLOADS, f"rayjob-{name}", {"conditions": timed})
