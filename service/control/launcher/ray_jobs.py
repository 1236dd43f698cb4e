"""Drivers as Ray jobs, through the dashboard's REST API, without `ray` in this process."""

import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from uuid import uuid4

import httpx

from moe.plan import Calibration
from service.control.launcher.launcher import (
    ClusterFacts,
    Launcher,
    LauncherUnavailable,
    LaunchRefusal,
    NodeFacts,
    Observation,
)
from service.control.launcher.ray_failure import last_line, parse_failure
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import CALIBRATION_MARK, Launch
from service.wire.trouble import Trouble

ANSWER_TIMEOUT_S = 20.0
CALIBRATION_TIMEOUT_S, LOOK_INTERVAL_S = 300.0, 0.5
TROUBLE_INTERVAL_S = 0.25
MAX_REQUESTS = 8
"""Maximum number of concurrent requests: the controller's, and those for clients' plans."""
MAX_NODES = MAX_ACTORS = 10_000
ACCELERATOR_LABEL = "ray.io/accelerator-type"
_MIB = 1024**2

Status = Literal["pending", "running", "succeeded", "failed", "stopped"]
_STATUS: dict[str, Status] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


class RayJobsLauncher(Launcher):
    """One Ray job per attempt; its submission id makes submitting idempotent."""

    def __init__(
        self,
        dashboard_url: str,
        driver_python: str,
        token_path: Path | None = None,
        trouble: Callable[[], Trouble | None] = lambda: None,
    ) -> None:
        """`trouble` returns the reason not to call the cluster now, if there is one."""
        self._trouble = trouble
        self._requests = ThreadPoolExecutor(MAX_REQUESTS, "ray-jobs")
        self._sessions: dict[str, str] = {}
        """Ray session of each unfinished submission; other sessions do not know it."""
        self._url = dashboard_url.rstrip("/")
        self._token_path = token_path
        self._driver_python = driver_python
        self._client = httpx.Client(
            base_url=self._url, timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=3.0), trust_env=False
        )

    def cluster(self) -> ClusterFacts:
        answer = self._json("GET", f"/api/v0/nodes?detail=1&limit={MAX_NODES}")
        living_nodes = [node for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]
        if not living_nodes:
            raise LauncherUnavailable(
                f"no node of the Ray cluster at {self._url} is alive, including the head; restart it"
            )
        gpu_memory = self._gpu_memory() if any(_amount(node, "GPU") for node in living_nodes) else {}
        return ClusterFacts(nodes=tuple(_facts(node, gpu_memory.get(node["node_id"])) for node in living_nodes))

    def submit(self, launch: Launch) -> None:
        path = AttemptFolder(launch.storage, launch.attempt).write_launch(launch)
        response = self._request(
            "POST",
            "/api/jobs/",
            json={
                "submission_id": launch.submission_id,
                "entrypoint": shlex.join([self._driver_python, "-m", "service.run.driver", path]),
                "entrypoint_num_cpus": 0,  # the driver only waits; its workers hold the CPUs
                "metadata": {"shardyard_job": launch.job_id, "name": launch.spec.name},
            },
        )
        if response.status_code == 200 or "already exists" in response.text:
            return
        if response.status_code == 400:
            raise LaunchRefusal(f"Ray refuses the job: {last_line(response.text)}")
        raise self._unavailable(response)

    def observe(self, submission_id: str) -> Observation:
        response = self._request("GET", _job_path(submission_id))
        if response.status_code == 404 and f"{submission_id} does not exist" in response.text:
            known_by = self._sessions.get(submission_id)
            return Observation(status="unknown", forgotten=known_by not in (None, self._session()))
        if response.status_code != 200:
            raise self._unavailable(response)
        job = response.json()
        status = _STATUS.get(job["status"], "pending")
        failure = parse_failure(job.get("message") or "")
        observation = Observation(
            status=status, message=failure.message, output=failure.output, preempted=failure.preempted
        )
        if observation.has_ended:
            self._sessions.pop(submission_id, None)
        elif submission_id not in self._sessions:
            # Read after the observation: if the cluster is replaced in between, the submission counts as the new one's.
            self._sessions[submission_id] = self._session()
        if observation.has_ended and job.get("job_id"):
            return observation.model_copy(update={"released": not self._has_workers(job["job_id"])})
        return observation

    def stop(self, submission_id: str) -> None:
        response = self._request("POST", f"{_job_path(submission_id)}/stop")
        if response.status_code not in (200, 404):
            raise self._unavailable(response)
        self._sessions.pop(submission_id, None)  # noted again if it still runs

    def calibrate(self) -> Calibration:
        submission_id = f"calibrate-{uuid4().hex[:12]}"
        entrypoint = shlex.join([self._driver_python, "-m", "service.run.calibrate"])
        body = {"submission_id": submission_id, "entrypoint": entrypoint, "entrypoint_num_cpus": 0}
        response = self._request("POST", "/api/jobs/", json=body)
        if response.status_code != 200:
            raise self._unavailable(response)
        try:
            observation = self._await_end(submission_id, CALIBRATION_TIMEOUT_S)
        except (LauncherUnavailable, LaunchRefusal):
            with suppress(LauncherUnavailable):
                self.stop(submission_id)
            raise
        output = str(self._json("GET", f"{_job_path(submission_id)}/logs")["logs"])
        calibration_lines = [
            line.removeprefix(CALIBRATION_MARK) for line in output.splitlines() if line.startswith(CALIBRATION_MARK)
        ]
        if observation.status != "succeeded" or not calibration_lines:
            reason = last_line(output) if output.strip() else observation.message or "no output"
            raise LaunchRefusal(f"cannot measure the cluster: {reason}")
        return Calibration.model_validate_json(calibration_lines[-1])

    def _await_end(self, submission_id: str, timeout_s: float) -> Observation:
        """Wait for the end of a submission. Raises LaunchRefusal if it does not end in time, or Ray no longer knows
        it."""
        deadline = time.monotonic() + timeout_s
        while not (observation := self.observe(submission_id)).has_ended:
            if observation.status == "unknown":
                raise LaunchRefusal("Ray no longer knows the measurement; try again")
            if time.monotonic() > deadline:
                raise LaunchRefusal(f"the cluster was not measured within {timeout_s} s")
            time.sleep(LOOK_INTERVAL_S)
        return observation

    def dashboard_url(self, submission_id: str) -> str | None:
        return f"{self._url}/#/jobs/{quote(submission_id, safe='')}"

    def close(self) -> None:
        self._client.close()
        self._requests.shutdown(wait=False)

    def _has_workers(self, ray_job_id: str) -> bool:
        """Whether workers of an ended driver hold resources. Ray's helpers, which hold none, may remain."""
        query = [("detail", "1"), ("limit", str(MAX_ACTORS))]
        for key, predicate, value in (("job_id", "=", ray_job_id), ("state", "!=", "DEAD")):
            query += [("filter_keys", key), ("filter_predicates", predicate), ("filter_values", value)]
        answer = self._json("GET", "/api/v0/actors", params=query)
        return any(actor["placement_group_id"] for actor in answer["data"]["result"]["result"])

    def _session(self) -> str:
        return str(self._json("GET", "/api/version").get("session_name", ""))

    def _gpu_memory(self) -> dict[str, int]:
        """Memory of each node's smallest GPU, where Ray's agents see real ones."""
        answer = self._json("GET", "/nodes?view=summary")
        memory_by_node = {}
        for node in answer["data"]["summary"]:
            sizes = [int(gpu["memoryTotal"]) * _MIB for gpu in node.get("gpus") or () if gpu.get("memoryTotal")]
            if sizes:
                memory_by_node[node["raylet"]["nodeId"]] = min(sizes)
        return memory_by_node

    def _json(self, method: str, path: str, **options: Any) -> Any:
        response = self._request(method, path, **options)
        if response.status_code != 200:
            raise self._unavailable(response)
        return response.json()

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        # A restarted cluster has a new token in the same file.
        headers = {}
        try:
            if self._token_path is not None:
                headers["Authorization"] = f"Bearer {self._token_path.read_text().strip()}"
            self._raise_known_trouble()
            answer = self._requests.submit(self._client.request, method, path, headers=headers, **options)
            while not wait((answer,), TROUBLE_INTERVAL_S).done:
                self._raise_known_trouble()  # a dashboard whose cluster died hangs for a long time
            return answer.result()
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise LauncherUnavailable(f"cannot reach Ray at {self._url}: {reason}") from error

    def _raise_known_trouble(self) -> None:
        if (trouble := self._trouble()) is not None:
            raise LauncherUnavailable(trouble.reason, trouble.runs_nothing)

    def _unavailable(self, response: httpx.Response) -> LauncherUnavailable:
        if response.status_code in (401, 403):
            source = f"{self._token_path} holds" if self._token_path else "SHARDYARD_RAY_TOKEN_PATH names"
            return LauncherUnavailable(f"Ray at {self._url} rejects the token that {source}")
        message = last_line(response.text)
        return LauncherUnavailable(f"Ray at {self._url} responds {response.status_code}: {message}")


def _facts(node: dict[str, Any], gpu_memory_bytes: int | None) -> NodeFacts:
    accelerators = [name.partition(":")[2] for name in node["resources_total"] if name.startswith("accelerator_type:")]
    return NodeFacts(
        id=node["node_id"],
        ip=node["node_ip"],
        cpus=_amount(node, "CPU"),
        gpus=_amount(node, "GPU"),
        memory_bytes=int(_amount(node, "memory")),
        accelerator=(node.get("labels") or {}).get(ACCELERATOR_LABEL) or (accelerators[0] if accelerators else None),
        accelerator_memory_bytes=gpu_memory_bytes,
    )


def _amount(node: dict[str, Any], resource: str) -> float:
    return float(node["resources_total"].get(resource, 0.0))


def _job_path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"
