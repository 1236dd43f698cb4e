"""Runs `ray start` on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from service.head.processes import Process, session_members, session_roots, signal_all
from service.wire.node_folder import temp_folder

OBJECT_STORE_BYTES = 200_000_000
FOLDER_VARIABLE = "LOCAL_HEAD_FOLDER"
"""Environment variable with the head's folder, which identifies its processes."""
RAY = """
import time
import psutil
from ray._private import services
from ray.scripts.scripts import main

def raylet_lives():
    try:
        children = psutil.Process().children()
        return any(each.name() == "raylet" and each.status() != psutil.STATUS_ZOMBIE for each in children)
    except psutil.NoSuchProcess:  # one that ended meanwhile: asked again
        return True

def get_node(*named, found=services.get_node):
    while True:
        try:
            return found(*named)
        except RuntimeError:
            if not raylet_lives():
                raise ChildProcessError("its raylet is gone") from None
        time.sleep(0.1)

services.get_node = get_node
services.resolve_ip_for_localhost = str
main()
"""
"""The command `ray`, patched to keep 127.0.0.1 as given, and to wait for a raylet as long as that lives, not 30 s."""
AGENTS_ARE_LATE = "Timed out waiting for file"
"""Log line of a raylet that gives up on its agents after 15 s, which no setting changes."""


class LocalHeadError(RuntimeError):
    """The head did not start; the message ends with Ray's output."""


@dataclass(frozen=True)
class Node:
    """Processes that one `ray start` left running, in their own session."""

    session: int
    processes: tuple[Process, ...]
    others: tuple[Process, ...] = ()
    """Processes that jobs do not need."""

    def running(self) -> bool:
        return bool(self.processes) and all(process.find() for process in self.processes)


def ray_start(
    signals: list[int], folder: Path, token_path: Path, *arguments: str, timeout_s: float, environment: dict[str, str]
) -> Node:
    """Run `ray start` in its own session with a `folder` below the head's; returns the processes it left. Repeated
    if Ray's agents are late. Raises LocalHeadError if it fails, times out, or a signal comes; no process is left
    then."""
    command = [
        sys.executable, "-c", RAY, "start", *arguments, f"--temp-dir={folder}",
        f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats",
        # The default port is the same for all heads of a machine: the second would have no agent for jobs.
        f"--dashboard-agent-listen-port={free_ports(1)[0]}",
        "--min-worker-port=0", "--max-worker-port=0",  # any free port: two nodes would clash in a range
        "--no-monitor",  # the autoscaler, useless on one machine
        "--include-log-monitor=false",  # copies worker output to drivers; ours goes to storage
        "--log-style=record", "--log-color=false",
    ]  # fmt: skip
    variables = {**ray_environment(token_path, folder.parent), **environment}
    deadline = time.monotonic() + timeout_s
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / "ray-start.out").open("wb") as output:
            starter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=folder,
                start_new_session=True,
            )  # fmt: skip
        session = starter.pid
        while starter.poll() is None and not signals and time.monotonic() < deadline:
            time.sleep(0.02)
        if starter.returncode == 0:
            # Agents and idle workers below the raylet come and go; the session's roots do not.
            return Node(session, tuple(session_roots(session)))
        cause = starter.returncode or ("a signal" if signals else f"no end after {timeout_s:.0f} s")
        end_session(session)
        starter.wait()
        given_up = _given_up(folder)
        if signals or AGENTS_ARE_LATE not in given_up or time.monotonic() >= deadline:
            last_lines = [*_lines(folder / "ray-start.out")[-15:], *filter(None, [given_up])]
            raise LocalHeadError("\n".join([f"ray start failed ({cause}):", *last_lines]))
        shutil.rmtree(folder, ignore_errors=True)


def end_session(session: int) -> None:
    while members := set(session_members(session)):
        signal_all(members, signal.SIGKILL)
        time.sleep(0.02)


def ray_environment(token_path: Path, head_folder: Path) -> dict[str, str]:
    """Environment of the head's processes, without another Ray's variables or the control plane's: a driver must not
    have the API's token or the database."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHARDYARD_"))}
    return {
        **variables,
        FOLDER_VARIABLE: str(head_folder),
        "TMPDIR": str(temp_folder()),  # the head, drivers and workers create sockets there
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # The monitor kills workers when the machine's memory runs low, here mostly because of other programs.
        "RAY_memory_monitor_refresh_ms": "0",
        # The GCS gives up a node after 5 failed health checks: one whose raylet is dead, so that its port refuses
        # them, after 5 s, not 15 s. A silent one still has 5 times Ray's time-out of 10 s.
        "RAY_health_check_period_ms": "1000",
        # On a busy machine the GCS takes longer than Ray's 30 s; `timeout_s` bounds the start.
        "RAY_gcs_server_port_wait_time_s": "300",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # workers share cores: waiting must not spin
        "PYTHONUNBUFFERED": "1",
    }


def free_ports(count: int) -> list[int]:
    """Ports without listeners."""
    holders = [socket.socket() for _ in range(count)]
    for holder in holders:
        holder.bind(("127.0.0.1", 0))
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    return ports


def _given_up(folder: Path) -> str:
    """Fatal log line of a folder's raylet, or ""."""
    lines = (line for log in folder.glob("session_*/logs/raylet.out") for line in _lines(log))
    return next((line for line in lines if " C " in line.partition("]")[0]), "")


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()
