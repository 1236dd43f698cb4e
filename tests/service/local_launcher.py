"""Runs drivers as plain processes of this machine: a stand-in for Ray.

A stand-in because a Ray cluster takes half a minute to start, and these tests are about the control plane.
The drivers are real processes that outlive it, found again by what lies in a folder, and they speak HTTP.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from moe.plan import Calibration
from service.control.launcher.launcher import (
    ClusterFacts,
    Launcher,
    LauncherUnavailable,
    LaunchRefusal,
    NodeFacts,
    Observation,
)
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch

DRIVER = "tests.service.local_driver"
TRAINING_DRIVER = "tests.service.training_driver"
"""Of jobs with the label `trains`."""
CLAIM = 'set -C; echo $$ > "$0" && exec "$@"'
"""The first process to make the file is the driver, and keeps its pid: submitting twice starts one, whenever
the submitter is killed."""


def launches(storage: str | Path, attempt: int) -> list[Path]:
    """Launch files of an attempt's driver; each holds a token."""
    return [*Path(storage, f"attempts/{attempt}").glob("launch.*.json")]


class LocalLauncher(Launcher):
    """A folder is the cluster: `nodes.json` lists nodes, `unreachable` makes it unreachable, a pid file is a driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def set_nodes(self, *nodes: NodeFacts) -> None:
        (self.folder / "nodes.json").write_text(json.dumps([node.model_dump() for node in nodes]))

    def cluster(self) -> ClusterFacts:
        self._reach()
        nodes = json.loads((self.folder / "nodes.json").read_text())
        return ClusterFacts(nodes=tuple(NodeFacts.model_validate(node) for node in nodes))

    def submit(self, launch: Launch) -> None:
        self._reach()
        if launch.spec.labels.get("refuse"):
            raise LaunchRefusal("no driver of this name is allowed here")
        if self._pid_file(launch.submission_id).exists():
            return
        if (self.folder / "read-only-storage").exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), launch.storage)
        path = AttemptFolder(launch.storage, launch.attempt).write_launch(launch)
        with (self.folder / f"{launch.submission_id}.log").open("ab") as log:
            module = TRAINING_DRIVER if "trains" in launch.spec.labels else DRIVER
            command = ["sh", "-c", CLAIM, self._pid_file(launch.submission_id), sys.executable, "-m", module, path]
            child = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
        self._children[child.pid] = child
        while not self._pid(launch.submission_id):
            time.sleep(0.001)

    def observe(self, submission_id: str) -> Observation:
        self._reach()
        if not self._pid_file(submission_id).exists():
            return Observation(status="unknown")
        if self.process(submission_id) is not None:
            return Observation(status="running")
        if (self.folder / f"{submission_id}.stopped").exists():
            return Observation(status="stopped", message="was killed")
        output = (self.folder / f"{submission_id}.log").read_text()[-20_000:]
        # How it ended is in its result.
        return Observation(status="failed", message="the driver is gone", output=output)

    def stop(self, submission_id: str) -> None:
        self._reach()
        if (process := self.process(submission_id)) is not None:
            (self.folder / f"{submission_id}.stopped").touch()
            process.send_signal(signal.SIGKILL)

    def calibrate(self) -> Calibration:
        self._reach()
        if (self.folder / "no-room").exists():
            raise LaunchRefusal("2 workers were not placed within 120 s")
        return Calibration(machine="a stand-in", flops_per_s={"float32": 1e9}, layer_s=1e-3)

    def dashboard_url(self, submission_id: str) -> str | None:
        return f"http://dashboard.invalid/#/jobs/{submission_id}"

    # For tests

    def launches(self) -> list[str]:
        """Submission ids in the order in which drivers were started."""
        pid_files = sorted(self.folder.glob("*.pid"), key=lambda path: path.stat().st_mtime_ns)
        return [path.stem for path in pid_files]

    def process(self, submission_id: str) -> psutil.Process | None:
        """The driver, while it runs."""
        pid = self._pid(submission_id)
        if pid is None:
            return None
        if (child := self._children.get(pid)) is not None:
            child.poll()  # reaps a dead child
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        # A process has no command for a moment while the shell makes room for the driver.
        return process if not command or submission_id[:16] in command else None

    def _pid_file(self, submission_id: str) -> Path:
        return self.folder / f"{submission_id}.pid"

    def _pid(self, submission_id: str) -> int | None:
        try:
            return int(self._pid_file(submission_id).read_text() or 0) or None
        except FileNotFoundError:
            return None

    def forget(self, submission_id: str) -> None:
        """Act as a cluster whose head was lost: end the driver and forget its submission."""
        if (process := self.process(submission_id)) is not None:
            process.kill()
        self._pid_file(submission_id).unlink()

    def set_reachable(self, reachable: bool) -> None:
        (self.folder / "unreachable").unlink(missing_ok=True) if reachable else (self.folder / "unreachable").touch()

    def end_all(self) -> None:
        """Ends every driver that still runs."""
        for submission_id in self.launches():
            if (process := self.process(submission_id)) is not None:
                process.kill()
        for child in self._children.values():
            child.wait()

    def _reach(self) -> None:
        if (self.folder / "unreachable").exists():
            raise LauncherUnavailable("connection refused")
