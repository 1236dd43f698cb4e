"""A control plane as a child process of a command."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from service.cli.failures import CommandError
from service.cli.footprint import MARK
from service.client import Client, ClientError
from service.signals import defer_signals, ignore_signals

START_TIMEOUT_S = 600.0
"""Longer than its Ray head may take."""
STOP_TIMEOUT_S = 120.0
TAIL_LINES = 15


class ControlPlaneChild:
    """`shardyard up` on a free loopback port; ended with its Ray head on exit."""

    def __init__(self, state_dir: Path, num_cpus: int | None, mark: str) -> None:
        self.state_dir, self._num_cpus, self._mark = state_dir, num_cpus, mark
        self.log_path = state_dir / "up.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> "ControlPlaneChild":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "service.cli.main", "up", "--stop-ray",
            "--host=127.0.0.1", f"--port={port}", f"--state-dir={self.state_dir}",
        ]  # fmt: skip
        if self._num_cpus is not None:
            command.append(f"--num-cpus={self._num_cpus}")
        # Settings of another control plane do not apply to this one.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("SHARDYARD_")}
        try:
            with self.log_path.open("wb") as log, defer_signals():
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env={**variables, MARK: self._mark},
                    start_new_session=True,  # Ctrl-C is passed on by this process, once
                )  # fmt: skip
        except BaseException:  # such as a deferred signal
            self._end()
            raise
        return self

    def await_ready(self) -> None:
        """Wait until it responds. Raises CommandError with the end of its log if it does not."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        with Client(self.url, token="") as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise CommandError(f"the control plane did not start\n{self.log_tail()}")
                try:
                    return client.healthy()
                except ClientError:
                    time.sleep(0.1)
        raise CommandError(f"the control plane did not respond within {START_TIMEOUT_S:g} s\n{self.log_tail()}")

    def log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join([*lines[-TAIL_LINES:], f"(full log: {self.log_path})"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        from service.head.local_head import LocalHead

        if self._process is None:
            return
        with ignore_signals():
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            LocalHead.stop_recorded(self.state_dir)  # if it was killed before it could
