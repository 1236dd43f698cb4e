"""A stand-in for `ray start`, which takes half a minute (`tests/ray/test_local_head.py` has a real one).

It starts three idle processes. One has the name of Ray's dashboard, listens at its port before `ray start` ends, and
answers that the head has no jobs. It replaces `service.head.ray_start.RAY`. It does not end while the file exists that
STAND_IN_HOLD names. While the file exists that STAND_IN_HOLD_JOBS names, the dashboard withholds its answer about jobs,
and writes `asked` into the file.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.head import ray_start
from service.head.local_head import LocalHead
from service.head.processes import Process
from tests.processes import with_environment

DASHBOARD = """
import http.server, os, sys, time

HOLD = os.environ.get("STAND_IN_HOLD_JOBS", "")

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/api/jobs/" and os.path.exists(HOLD):
            with open(HOLD, "w") as file:
                file.write("asked")
            while os.path.exists(HOLD):
                time.sleep(0.01)
        self.send_response(200 if self.path == "/api/jobs/" else 404)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Answer).serve_forever()
"""
STAND_IN = f"""
import os, socket, subprocess, sys, time
from pathlib import Path

DASHBOARD = {DASHBOARD!r}
given = dict(word[2:].split("=", 1) for word in sys.argv[2:] if "=" in word)
port = given["dashboard-port"]
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
for _ in range(2):
    subprocess.Popen(["sleep", "600"], **quiet)
dashboard = subprocess.Popen([sys.executable, "-c", DASHBOARD, "/dashboard.py", port], **quiet)
while socket.socket().connect_ex(("127.0.0.1", int(port))) != 0 and dashboard.poll() is None:
    time.sleep(0.01)
Path(given["temp-dir"], "ray_current_cluster").write_text("127.0.0.1:1")
while os.path.exists(os.environ.get("STAND_IN_HOLD", "")):
    time.sleep(0.01)
"""


def head_processes(state_dir: Path) -> list[psutil.Process]:
    """Processes that any start of a head left running for this state folder."""
    return with_environment("RAY_AUTH_TOKEN_PATH", str(state_dir / "ray" / "token"))


def process_of(process: "subprocess.Popen[bytes]") -> Process:
    return Process.from_psutil(psutil.Process(process.pid))


def found_head(state_dir: Path) -> LocalHead:
    head = LocalHead.find(state_dir)
    assert head is not None
    return head


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder whose head is a stand-in, stopped at the end whatever happens."""
    monkeypatch.setattr(ray_start, "RAY", STAND_IN)
    yield tmp_path / "state"
    LocalHead.stop_recorded(tmp_path / "state")
    for process in head_processes(tmp_path / "state"):
        process.kill()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that holds something back until it is removed."""
    hold = tmp_path / "hold"
    hold.touch()
    return hold
