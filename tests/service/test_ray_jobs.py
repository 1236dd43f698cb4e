"""Ray's answers about jobs, as the launcher reads them, from a server that answers as Ray's dashboard does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from moe.plan import Calibration
from service.control.launcher.launcher import LauncherUnavailable, LaunchRefusal
from service.control.launcher.ray_jobs import RayJobsLauncher
from service.wire.launch import CALIBRATION_MARK

UNKNOWN = (404, "Job a1 does not exist")


class Dashboard:
    """A server on loopback whose answers a test chooses."""

    def __init__(self) -> None:
        self.session = "session_1"
        self.job: tuple[int, Any] = UNKNOWN
        """Status code and body of the answer about any job."""
        self.logs = ""
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/api/version":
                    self._answer(200, {"session_name": dashboard.session})
                elif self.path.endswith("/logs"):
                    self._answer(200, {"logs": dashboard.logs})
                elif self.path.startswith("/api/v0/actors"):
                    self._answer(200, {"data": {"result": {"result": []}}})
                else:
                    self._answer(*dashboard.job)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(200, {})

            def _answer(self, code: int, body: Any) -> None:
                content = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Nothing in the tests' output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    dashboard = Dashboard()
    thread = threading.Thread(target=dashboard.server.serve_forever)
    thread.start()
    yield dashboard
    dashboard.server.shutdown()
    thread.join()
    dashboard.server.server_close()


@pytest.fixture
def launcher(dashboard: Dashboard) -> Iterator[RayJobsLauncher]:
    launcher = RayJobsLauncher(dashboard.url, "python")
    yield launcher
    launcher.close()


@pytest.mark.parametrize(
    ("status", "observed"),
    [("PENDING", "pending"), ("RUNNING", "running"), ("SUCCEEDED", "succeeded"), ("STOPPED", "stopped"),
     ("ADDED_LATER", "pending")],
)  # fmt: skip
def test_observation_of_a_job(launcher: RayJobsLauncher, dashboard: Dashboard, status: str, observed: str) -> None:
    dashboard.job = (200, {"status": status, "message": "of Ray"})
    observation = launcher.observe("a1")
    assert (observation.status, observation.message) == (observed, "of Ray")


def test_a_job_that_ray_does_not_know(launcher: RayJobsLauncher, dashboard: Dashboard) -> None:
    observation = launcher.observe("a1")
    assert (observation.status, observation.forgotten) == ("unknown", False)
    dashboard.job = (200, {"status": "RUNNING"})
    launcher.observe("a1")
    dashboard.job = UNKNOWN
    assert not launcher.observe("a1").forgotten
    dashboard.session = "session_2"
    assert launcher.observe("a1").forgotten, "a cluster that began after the job cannot know it"


@pytest.mark.parametrize("answer", [(404, "no such page"), (500, UNKNOWN[1]), (401, UNKNOWN[1])])
def test_an_answer_that_says_nothing_about_the_job(
    launcher: RayJobsLauncher, dashboard: Dashboard, answer: tuple[int, str]
) -> None:
    dashboard.job = answer
    with pytest.raises(LauncherUnavailable):
        launcher.observe("a1")


def test_calibration_is_the_last_one_in_the_log(launcher: RayJobsLauncher, dashboard: Dashboard) -> None:
    first, last = Calibration(machine="first"), Calibration(machine="last")
    dashboard.job = (200, {"status": "SUCCEEDED"})
    dashboard.logs = f"starting\n{CALIBRATION_MARK}{last.model_dump_json()}\n"
    assert launcher.calibrate() == last
    dashboard.logs = f"{CALIBRATION_MARK}{first.model_dump_json()}\n{dashboard.logs}done\n"
    assert launcher.calibrate() == last


@pytest.mark.parametrize(("status", "logs"), [("SUCCEEDED", "no figures"), ("STOPPED", f"{CALIBRATION_MARK}{{}}")])
def test_no_calibration(launcher: RayJobsLauncher, dashboard: Dashboard, status: str, logs: str) -> None:
    dashboard.job, dashboard.logs = (200, {"status": status}), logs
    with pytest.raises(LaunchRefusal):
        launcher.calibrate()
