"""A stand-in for KubeRay's operator that runs what it is told: a local Ray head in place of a RayJob's pods, and its
entry point as a Ray job on it.

A stand-in because a Kubernetes cluster cannot run here. As KubeRay in HTTPMode does, it submits the entry point again
where a replaced head does not know the Ray job.
"""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from service.control.kubernetes import PODS
from service.head.local_head import LocalHead
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.objects import Object
from tests.kubernetes.operator import Operator

LOOK_INTERVAL_S = 0.5


class RayOperator:
    """Acts on every RayJob in a thread, from `start` to `stop`."""

    def __init__(self, server: ApiServer, folder: Path, num_cpus: int) -> None:
        self._server, self._folder, self._num_cpus = server, folder, num_cpus
        self._operator = Operator(server)
        self._num_heads = 0
        self.heads: dict[str, LocalHead] = {}
        """Heads by the name of their RayJob."""
        self.failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for name in list(self.heads):
            self._stop_head(name)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_INTERVAL_S):
            try:
                self._look()
            except Exception as error:  # told by the test, which would wait in vain
                self.failure = error
                return

    def _look(self) -> None:
        ray_jobs = self._operator.ray_jobs()
        for name in self.heads.keys() - ray_jobs.keys():
            self._stop_head(name)
        for name, ray_job in ray_jobs.items():
            if not ray_job["metadata"].get("deletionTimestamp"):
                with suppress(httpx.HTTPError):  # deleted meanwhile; a head that does not answer is replaced below
                    self._reconcile(name, ray_job)

    def _reconcile(self, name: str, ray_job: Object) -> None:
        deployment = (ray_job.get("status") or {}).get("jobDeploymentStatus", "")
        if deployment == "":
            self._operator.start_cluster(name)
        elif deployment == "Initializing":
            self._start_head(name)
            self._operator.run(name)
            self._operator.set_job(name, "Running")
        elif deployment == "Running" and not self.heads[name].running():
            self._stop_head(name)
            self._server.admin("DELETE", PODS, f"{name}-head-0")
            self._operator.create_pods(name)
            self._start_head(name)
        elif deployment == "Running":
            self._follow(name, ray_job)
        else:
            self._stop_head(name)

    def _follow(self, name: str, ray_job: Object) -> None:
        """Submit the entry point if the head does not know it, or copy its status."""
        spec, head = ray_job["spec"], self.heads[name]
        headers = {"Authorization": f"Bearer {head.token_path.read_text().strip()}"}
        with httpx.Client(base_url=head.dashboard_url, headers=headers, timeout=60) as dashboard:
            answer = dashboard.get(f"/api/jobs/{spec['jobId']}")
            if answer.status_code == 404:
                body: dict[str, Any] = {"submission_id": spec["jobId"], "entrypoint": spec["entrypoint"]}
                dashboard.post("/api/jobs/", json={**body, "entrypoint_num_cpus": 0}).raise_for_status()
                return
            job = answer.raise_for_status().json()
        if job["status"] in ("SUCCEEDED", "FAILED", "STOPPED"):
            reason = "AppFailed" if job["status"] == "FAILED" else ""
            self._operator.end(name, job["status"], job.get("message") or "", reason)
        else:
            self._operator.set_job(
                name, "Running", job["status"], dashboardURL=head.dashboard_url.removeprefix("http://")
            )

    def _start_head(self, name: str) -> None:
        self._num_heads += 1
        self.heads[name] = LocalHead.start(self._folder / str(self._num_heads), num_cpus=self._num_cpus)

    def _stop_head(self, name: str) -> None:
        head = self.heads.pop(name, None)
        if head is not None:
            head.stop()
