"""Dashboard of a Ray head. Jobs are submitted through it but do not need it to run, so that it can be restarted
alone."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from service.head.processes import Process, signal_all

WAITS_TO_BE_RECORDED = 'exec 3<&0; { read word <&3 && exec "$@" 3<&-; } >"$0" 2>&1 & echo $!'
"""Shell that exits at once, so that the dashboard is reparented and outlives this process."""


class DashboardError(RuntimeError):
    """The dashboard did not start; the message ends with its last output."""


@dataclass(frozen=True)
class Dashboard:
    """A head's dashboard, and what is needed to restart it."""

    process: Process
    command: tuple[str, ...]
    url: str
    environment: dict[str, str]
    """Variables besides those of all the head's processes."""

    def running(self) -> bool:
        return self.process.find() is not None

    def start(self, environment: Mapping[str, str], folder: Path, record: Callable[["Dashboard"], None]) -> "Dashboard":
        """Start the dashboard again in `folder`; it responds later. Runs nothing until `record` has returned, and
        ends if this process dies before. Raises DashboardError."""
        with subprocess.Popen(
            ["sh", "-c", WAITS_TO_BE_RECORDED, _output(folder), *self.command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env=environment, cwd=folder,
            bufsize=0,  # no buffered write to retry at close
        ) as shell:  # fmt: skip
            assert shell.stdin is not None
            assert shell.stdout is not None
            try:
                dashboard = replace(self, process=Process.from_psutil(psutil.Process(int(shell.stdout.readline()))))
                record(dashboard)
                shell.stdin.write(b"recorded\n")
            except (psutil.NoSuchProcess, ValueError, BrokenPipeError):
                raise DashboardError(self._failure_text(folder)) from None
            return dashboard

    def await_answer(self, folder: Path, timeout_s: float, abort: Sequence[int] = ()) -> None:
        """Wait until the dashboard's port is open. Raises DashboardError, after killing it, if it died, is too slow,
        or `abort` is not empty."""
        deadline = time.monotonic() + timeout_s
        while not self._listens():
            if not self.running() or abort or time.monotonic() > deadline:
                signal_all({self.process}, signal.SIGKILL)
                raise DashboardError(self._failure_text(folder))
            time.sleep(0.05)

    def _listens(self) -> bool:
        address = urlsplit(self.url)
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((str(address.hostname), address.port or 0)) == 0

    def _failure_text(self, folder: Path) -> str:
        output = Path(_output(folder))
        last_lines = output.read_text(errors="replace").strip().splitlines()[-15:] if output.is_file() else []
        return "\n".join(["the dashboard did not start:", *last_lines])


def _output(folder: Path) -> str:
    return str(folder / "dashboard.out")
