"""A second driver of an attempt ends at once and harms nothing, whenever it is started."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import FENCED_EXIT_CODE
from tests.processes import await_that
from tests.procs.launching import launch

CLAIM = """
import sys
from service.wire.attempt_folder import AttemptFolder
print(AttemptFolder(sys.argv[1], 1).claim_driver())
"""


def driver(path: str, ray_port: int, node: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"RAY_ADDRESS": f"127.0.0.1:{ray_port}", "TMPDIR": str(node)}
    return subprocess.Popen(
        [sys.executable, "-m", "service.run.driver", path], env=environment, text=True, stderr=subprocess.PIPE
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_driver_ends_at_once(tmp_path: Path, node: Path) -> None:
    attempt = launch(tmp_path)
    path = AttemptFolder(attempt.storage, 1).write_launch(attempt)
    storage = Path(attempt.storage)
    with socket.create_server(("127.0.0.1", 0)) as silent_ray:  # accepts, and never answers: the first driver waits
        first = driver(path, silent_ray.getsockname()[1], node)
        try:
            await_that((storage / "attempts/1/driver").exists)
            before = files(storage)
            second = driver(path, silent_ray.getsockname()[1], node)
            _, errors = second.communicate()
            assert second.returncode == FENCED_EXIT_CODE
            assert attempt.job_id in errors
            assert files(storage) == before
            assert first.poll() is None
        finally:
            first.send_signal(signal.SIGKILL)
            first.communicate()
        third = driver(path, silent_ray.getsockname()[1], node)
        third.communicate()
        assert third.returncode == FENCED_EXIT_CODE, "the attempt of a killed driver is over"


@pytest.mark.slow
def test_of_drivers_started_together_one_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM, str(tmp_path / "storage")]
    claims = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE) for _ in range(4)]
    answers = [claim.communicate()[0].strip() for claim in claims]
    assert sorted(answers) == ["False", "False", "False", "True"]
