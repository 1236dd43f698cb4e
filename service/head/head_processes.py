"""The processes of a Ray head, as far as its record names them: found, and ended with all that came out of them."""

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
"""Ray's own processes, which are slow to end and lose nothing when killed."""


@dataclass(frozen=True)
class HeadProcesses:
    """Processes of one head that ran or run."""

    folder: Path
    """Folder of the head. The environment of its processes names it, which finds them if nothing else is known."""
    nodes: tuple[Node, ...] = ()
    dashboard: Process | None = None

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "HeadProcesses":
        """Processes of a head's record of any release, also of a head whose start was not finished."""
        nodes = tuple(
            Node(
                node["session"],
                *(
                    tuple(Process(**fields) for fields in node.get(kind, ()))
                    for kind in ("processes", "others")
                ),
            )
            for node in record.get("nodes", ())
        )
        dashboard = record.get("dashboard")
        return cls(Path(record["folder"]), nodes, Process(**dashboard["process"]) if dashboard else None)

    def end(self, grace_s: float) -> None:
        """Ends all of them. Drivers and workers get SIGTERM and `grace_s` to end. Ray's own processes are not waited
        for: they would go on looking for a GCS that is dead."""
        deadline = time.monotonic() + grace_s
        living = set(self._find())
        signal_all(living, signal.SIGTERM)
        while any(process.name not in _OF_RAY for process in living) and time.monotonic() < deadline:
            time.sleep(0.05)
            # Looked up again each time: a raylet may have started a worker in between.
            living = {process for process in living | set(self._find()) if process.find()}
        while living:
            signal_all(living, signal.SIGKILL)
            time.sleep(0.02)
            living = {process for process in living | set(self._find()) if process.find()}

    def _find(self) -> Iterator[Process]:
        """Processes that the head has started: its sessions, and the descendants of its processes.

        Drivers of jobs have sessions of their own, and are found as descendants of their supervisors.
        """
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
    """Processes started for the head in this folder, with all of their sessions: one that has given itself a title
    may have lost the environment that tells."""
    sessions = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(FOLDER_VARIABLE) == str(folder):
                sessions.add(os.getsid(process.pid))
        except (psutil.Error, OSError):
            continue
    for session in sessions:
        yield from session_members(session)
