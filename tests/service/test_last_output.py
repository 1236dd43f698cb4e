"""Why a driver died before it could report it: in the job's reason, and in its log."""

import os
from pathlib import Path

import pytest

from moe.storage.folder import Folder
from service.control.launcher.ray_failure import parse_failure
from service.control.report.last_output import NAME, store_last_output
from tests.service.control_plane import ControlPlane

HEAD = "Job entrypoint command failed with exit code"
TAIL = "last available logs (truncated to 20,000 chars):"


@pytest.mark.parametrize(
    ("message", "reason", "output"),
    [
        (f"{HEAD} 1, {TAIL}\nTraceback (most recent call last):\n  File \"x.py\"\nPermissionError: /tmp/x is closed\n",
         "exit code 1: PermissionError: /tmp/x is closed",
         "Traceback (most recent call last):\n  File \"x.py\"\nPermissionError: /tmp/x is closed"),
        (f"{HEAD} 127, {TAIL}\n/bin/sh: 1: python9: not found", "exit code 127: /bin/sh: 1: python9: not found",
         "/bin/sh: 1: python9: not found"),
        (f"{HEAD} -9. No logs available.", "killed by SIGKILL; no output", ""),
        (f"{HEAD} -11, {TAIL}\n\n", "killed by SIGSEGV; no output", ""),
        (f"{HEAD} -99, {TAIL}\nx", "exit code -99: x", "x"),
        ("Job supervisor actor died: The actor died unexpectedly before finishing this task.\n"
         "\tclass_name: JobSupervisor\n\tactor_id: 0a\n\tnamespace: SUPERVISOR_ACTOR_RAY_NAMESPACE\n"
         "The actor died because its node has died. Node Id: 1f\n\tthe actor's node was preempted: spot",
         "Job supervisor actor died: The actor died unexpectedly before finishing this task. The actor died because "
         "its node has died. Node Id: 1f the actor's node was preempted: spot", ""),
        ("Unexpected error occurred: the supervisor died", "Unexpected error occurred: the supervisor died", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_how_ray_says_that_a_driver_died(message: str, reason: str, output: str) -> None:
    failure = parse_failure(message)
    assert (failure.message, failure.output) == (reason, output)


def test_a_driver_that_dies_before_it_writes_leaves_its_words_in_the_log(plane: ControlPlane) -> None:
    job = plane.post(labels={"crash": "yes"}, retry={"max_failures": 1})
    plane.await_state(job["id"], "failed")
    log = plane.http.get(f"/v1/jobs/{job['id']}/logs").text
    assert log.count("PermissionError: the spool must be a folder that only its user can read") == 2
    assert "a1.driver" in log
    assert "a2.driver" in log


def test_what_its_log_has_already_is_not_kept_twice(tmp_path: Path) -> None:
    storage = Folder(str(tmp_path))
    storage.write("logs/a1.driver/segment-00000000.log", b"2026-01-31T12:00:00.123456Z info    one\n")
    for _ in range(2):
        store_last_output(storage, 1, "one\n\nFatal Python error: Aborted\n")
    assert storage.names("logs/a1.driver") == ["segment-00000000.log", NAME]
    [line] = storage.read(f"logs/a1.driver/{NAME}").decode().splitlines()
    assert line.split(" ", 1)[1] == "err     Fatal Python error: Aborted"
    store_last_output(storage, 2, "one\n")
    assert storage.names("logs") == ["a1.driver", "a2.driver"]
    store_last_output(storage, 3, "\n")
    assert not os.path.exists(tmp_path / "logs" / "a3.driver")
