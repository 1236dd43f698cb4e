"""A control plane as a process of its own, with the local launcher: `python -m tests.service.control_plane ...`."""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.control.launcher.launcher import NodeFacts
from service.wire.events import Event
from tests.forks import Fork, forks
from tests.processes import DEADLINE_S, await_that
from tests.service.local_launcher import LocalLauncher

TOKEN = "a-token-of-more-than-sixteen-characters"
NODE = NodeFacts(id="n0", ip="127.0.0.1", cpus=8, memory_bytes=16 << 30)


class ControlPlane:
    """Starts, kills and starts again one control plane on one folder and one port."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.launcher = LocalLauncher(folder / "cluster")
        self.launcher.set_nodes(NODE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.settings = {
            "state_dir": str(folder / "state"),
            "port": self.port,
            "controller_interval_s": 0.05,
            "lease_s": 1.0,
            "lost_grace_s": 0.3,
            "tracking_interval_s": 0.1,
            **settings,
        }
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Fork | None = None
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)

    @property
    def database(self) -> Path:
        return self.folder / "state" / "shardyard.db"

    @property
    def database_url(self) -> str:
        return str(self.settings.get("database_url") or f"sqlite:///{self.database}")

    def start(self, **settings: Any) -> "ControlPlane":
        """Start it with further settings, which later starts keep."""
        self.settings |= settings
        if token := self.settings.get("token"):
            self.http.headers["authorization"] = f"Bearer {token}"
        self.log = (self.folder / "control-plane.log").open("ab")
        self.process = forks(
            "tests.service.control_plane:main", "service.control.server", "tests.service.compiled_templates"
        ).start([json.dumps(self.settings), str(self.launcher.folder)], out=self.log)
        await_that(self._is_ready, self.log_text)
        return self

    def kill(self) -> None:
        """Send SIGKILL, and wait for the process to end."""
        self.process.kill()
        self.process.wait()
        self.log.close()

    def terminate(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=DEADLINE_S)
        self.log.close()
        return status

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.terminate()
        self.launcher.end_all()
        self.http.close()

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log_text()
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, **changes: Any) -> dict[str, Any]:
        """Response to posting a job of `spec`."""
        return self.submit(spec(**changes))

    def submit(self, job: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post("/v1/jobs", json=job)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/jobs/{job_id}").json())

    def await_state(self, job_id: str, *states: str) -> dict[str, Any]:
        await_that(lambda: self.job(job_id)["state"] in states, lambda: f"not {states}: {self.job(job_id)}")
        return self.job(job_id)

    def finished_job(self, **changes: Any) -> dict[str, Any]:
        return self.await_state(self.post(**changes)["id"], "succeeded")

    def act(self, job_id: str, action: str) -> httpx.Response:
        return self.http.post(f"/v1/jobs/{job_id}/{action}")

    def list_jobs(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.http.get("/v1/jobs", params=query).json()["items"])

    def metrics(self, job_id: str, **query: Any) -> list[dict[str, Any]]:
        return list(self.http.get(f"/v1/jobs/{job_id}/metrics", params=query).json()["items"])

    def losses(self, job_id: str) -> dict[int, float]:
        return {point["step"]: point["loss"] for point in self.metrics(job_id, name="loss")}

    def log_text(self) -> str:
        """The control plane's own log."""
        return (self.folder / "control-plane.log").read_text()

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def hold(self) -> Path:
        """File whose existence keeps the driver of a job with the label `hold` (=hold) running."""
        path = self.folder / "state/cache/hold"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    def driver(self, job_id: str, attempt: int = 1) -> psutil.Process:
        """Running process of an attempt's driver."""
        process = self.launcher.process(f"{job_id}-a{attempt}")
        assert process is not None
        return process

    def events(self, job_id: str, last_id: int | None = None) -> Iterator[Event]:
        """One connection's events: ends when the stream does, raises httpx.TransportError when it breaks."""
        headers = {} if last_id is None else {"last-event-id": str(last_id)}
        with self.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif "data" in fields:
                    event = Event.model_validate_json(fields["data"])
                    assert (fields["id"], fields["event"]) == (str(event.id), event.kind)
                    yield event
                    fields = {}


def spec(**changes: Any) -> dict[str, Any]:
    """A small job; `labels` steer the local driver."""
    return {
        "name": "small",
        "model": {"preset": "gshard-tiny"},
        "data": {"corpus": "catalogs"},
        "train": {"num_steps": 5, "batch_tokens": 1024},
        **changes,
    }


def main() -> None:
    from service.control.server import serve
    from service.settings import Settings

    serve(Settings(**json.loads(sys.argv[1])), LocalLauncher(Path(sys.argv[2])))
