"""Processes of a Ray head, found from its record and ended with all descendants."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from service.head.processes import Process, descendants, session_members, signal_all
from service.head.ray_start import FOLDER_VARIABLE, Node

_OF_RAY = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own processes, which end slowly and lose nothing when killed."""


@dataclass(frozen=True)
class HeadProcesses:
    """Recorded processes of one head."""

    folder: Path
    """Folder of the head, also in its processes' environment."""
    nodes: tuple[Node, ...] = ()
    dashboard: Process | None = None

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "HeadProcesses":
        """Processes in a record of any release, or of an unfinished start."""
        nodes = tuple(
            Node(
                node["session"],
                *(tuple(Process(**fields) for fields in node.get(kind, ())) for kind in ("processes", "others")),
            )
            for node in record.get("nodes", ())
        )
        dashboard = record.get("dashboard")
        return cls(Path(record["folder"]), nodes, Process(**dashboard["process"]) if dashboard else None)

    def end(self, grace_s: float) -> None:
        """End all processes. Drivers and workers get SIGTERM and `grace_s`; Ray's own are killed, since they would
        look for a dead GCS."""
        deadline = time.monotonic() + grace_s
        living = set(self._find())
        signal_all(living, signal.SIGTERM)
        while any(process.name not in _OF_RAY for process in living) and time.monotonic() < deadline:
            time.sleep(0.05)
            # Searched again each time: a raylet may have started a worker in between.
            living = {process for process in living | set(self._find()) if process.find()}
        while living:
            signal_all(living, signal.SIGKILL)
            time.sleep(0.02)
            living = {process for process in living | set(self._find()) if process.find()}

    def _find(self) -> Iterator[Process]:
        """Members of the head's sessions, and descendants. Drivers have own sessions, and descend from their
        supervisors."""
        roots = set(_started_for(self.folder))
        if self.dashboard is not None and self.dashboard.find():
            roots.add(self.dashboard)
        for node in self.nodes:
            living_processes = {process for process in (*node.processes, *node.others) if process.find()}
            roots |= living_processes | (set(session_members(node.session)) if living_processes else set())
        for root in roots:
            yield root
            if (psutil_process := root.find()) is not None:
                yield from descendants(psutil_process)


def _started_for(folder: Path) -> Iterator[Process]:
    """Members of all sessions of processes with this folder in their environment, which a changed process title may
    overwrite."""
    sessions = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(FOLDER_VARIABLE) == str(folder):
                sessions.add(os.getsid(process.pid))
        except (psutil.Error, OSError):
            continue
    for session in sessions:
        yield from session_members(session)
