"""`shardyard up` as its own process, on the tests' Ray head."""

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from service.client import Client, Job
from service.head.local_head import LocalHead
from service.wire.events import Event
from tests.forks import Fork, forks
from tests.listening import Address
from tests.processes import DEADLINE_S, await_that

DEMO = Path(__file__).parents[2] / "examples" / "translate-100-to-english.yaml"
THREE_LANGUAGES = {"corpus": "catalogs", "languages": ["de", "fr", "uk"]}
"""Data that is prepared in a moment."""
NUM_STEPS = 80
"""So many that a run is not over before it has been paused once and killed three times."""


def job_spec(**changes: Any) -> dict[str, Any]:
    """The demo's job with fewer languages and steps: it trains a real model within seconds, on two workers."""
    demo: dict[str, Any] = yaml.safe_load(DEMO.read_text())
    return {
        **demo,
        "data": THREE_LANGUAGES,
        "train": {**demo["train"], "num_steps": NUM_STEPS, "evaluation": {"max_pairs": 16}},
        "resources": {"num_workers": 2, "gpus_per_worker": 0},
        "checkpoint": {"every_steps": 10, "keep": 2},
        **changes,
    }


class ControlPlane:
    """A control plane on one folder and one port, which tests start, kill and restart."""

    def __init__(self, head: LocalHead, cache: Path, folder: Path, **settings: Any) -> None:
        self.folder, self._head, self._cache = folder, head, cache
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._settings = {f"SHARDYARD_{name.upper()}": str(value) for name, value in settings.items()}
        self.client = Client(self.url)
        self.process: Fork | None = None

    def start(self) -> "ControlPlane":
        self._output = (self.folder / "control-plane.out").open("ab")
        arguments = [
            "up", f"--port={self.port}", f"--state-dir={self.folder / 'state'}",
            f"--ray-dashboard-url={self._head.dashboard_url}", f"--ray-token-path={self._head.token_path}",
        ]  # fmt: skip
        overrides = {"SHARDYARD_CACHE_DIR": str(self._cache), "SHARDYARD_LEASE_S": "1", **self._settings}
        environment = {**os.environ, **overrides}
        up = forks("service.cli.main:main", "service.control.launcher.ray_jobs", "service.control.server")
        self.process = up.start(arguments, out=self._output, environment=environment)
        await_that(self._is_ready, self.output)
        return self

    def kill(self) -> None:
        """Send SIGKILL, which leaves no time for a shutdown."""
        self.process.kill()
        self.process.wait()
        self._output.close()

    def close(self) -> None:
        """Cancel running jobs and stop the control plane."""
        if self.process is None or self.process.poll() is not None:
            return
        for job in self.client.jobs():
            if not job.ended:
                job.cancel()
                job.wait(DEADLINE_S)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE_S)
        self._output.close()
        self.client.close()

    def output(self) -> str:
        return (self.folder / "control-plane.out").read_text()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.output()
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@dataclass
class FinishedJob:
    plane: ControlPlane
    job: Job
    events: list[Event]
    listening: list[Address]
    """Where the processes of the cluster, workers and driver among them, listened while it trained."""
    actors: list[str]
    """By Ray's names, its processes that were there meanwhile."""


def state_changes(events: list[Event]) -> list[dict[str, Any]]:
    """Changes of state, in order; a repeated state with a new reason does not count."""
    states = [event.data for event in events if event.kind == "state"]
    return [data for data in states if data["state"] != data["previous"]]


def losses(job: Job) -> dict[int, float]:
    """Loss of every step, as the history has it: the newer one of a repeated step."""
    return {point["step"]: point["loss"] for point in job.metrics()}


def await_checkpoint(job: Job, step: int, and_steps: int = 3) -> None:
    """Return once the checkpoint of `step` is committed and the run is some steps further."""

    def is_committed() -> bool:
        steps = [checkpoint["step"] for checkpoint in job.checkpoints()]
        return max(steps, default=0) >= step and job.refresh().step >= step + and_steps

    await_that(is_committed, lambda: f"{job.refresh().data}")


def worker_group(job: Job, number: int = 0, attempt: int = 1) -> list[dict[str, Any]]:
    """Workers of a worker group of an attempt, by rank, once they have started."""
    stream = job.events()
    start = next(
        event
        for event in stream
        if event.data.get("record") == "started" and (event.attempt, event.data["group"]) == (attempt, number)
    )
    stream.close()
    workers: list[dict[str, Any]] = start.data["workers"]
    return workers


def kill_node(head: LocalHead, index: int) -> None:
    """SIGKILL all processes of a node: its raylet and agents, then the workers below them, whose deaths a running
    raylet would report as if the node were healthy."""
    session = head.nodes[index].session
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) == session:
                processes.append(process)
    children: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            children += process.children(recursive=True)
    for process in (*processes, *children):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def driver_process(job: Job) -> psutil.Process:
    """Driver process of the newest attempt."""
    folder = f"{job.storage}/attempts/{job.refresh().data['attempt']}/launch."
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "".join(command[-1:]).startswith(folder) and "service.run.driver" in command and "-c" not in command[:2]:
            return process
    raise AssertionError(f"no driver of {job.id} runs")
