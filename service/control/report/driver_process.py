"""A silent driver's process on this machine: finds, examines and kills it."""

import os
import socket
import time
from contextlib import suppress

import psutil

from service.control.report.silent_driver import ProcessState
from service.wire.process_state import cpu_seconds, state_of
from service.wire.run_status import RunStatus

SEARCH_INTERVAL_S = 10.0
"""Interval of searches for a driver that has not reported its pid."""
IDLE_AFTER_S, WINDOW_S, WORKING_CPU_SHARE = 60.0, 5.0, 0.02
"""A process is idle after `IDLE_AFTER_S` with less than `WORKING_CPU_SHARE` of a core in each window of `WINDOW_S`."""


class DriverProcess:
    """Driver process of an attempt."""

    def __init__(self, launch: str) -> None:
        """`launch`: path prefix of the launch file, the driver's last argument."""
        self.launch = launch
        self._process: psutil.Process | None = None
        self._searched_at = -float("inf")
        self._window: tuple[float, float] | None = None
        """Start of the window, and the process's CPU seconds then."""
        self._worked_at = 0.0
        self._stopped_since: float | None = None

    def look(self, status: RunStatus | None) -> tuple[ProcessState, str]:
        """(state, description) of the process. `status`: the driver's last report of itself."""
        state, description = self._look(status)
        if state != "stopped":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        return state, description

    def stopped_s(self) -> float:
        """Time for which every `look` has seen the process stopped."""
        return 0.0 if self._stopped_since is None else time.monotonic() - self._stopped_since

    def _look(self, status: RunStatus | None) -> tuple[ProcessState, str]:
        process = self._find(status)
        if process is None:
            description = f"process {status.pid} on {status.host}" if status is not None and status.pid else ""
            return "unseen", description
        description = f"process {process.pid} on {socket.gethostname()}"
        try:
            state = state_of(process)
            if state in ("stopped", "frozen"):
                return "stopped", description
            if state == "gone":
                return "unseen", description
            if state == psutil.STATUS_TRACING_STOP:  # in a debugger
                return "working", description
            return ("working" if self._works(process) else "idle"), description
        except psutil.Error:
            return "unseen", description

    def end(self, status: RunStatus | None) -> bool:
        """Send SIGKILL to the process. False if it is not on this machine."""
        process = self._find(status)
        if process is None:
            return False
        with suppress(psutil.Error):
            process.kill()
            return True
        return False

    def _find(self, status: RunStatus | None) -> psutil.Process | None:
        if self._process is None or not self._process.is_running():
            if status is None or not status.pid:
                self._process = self._search()
            else:
                self._process = _find_reported_process(status) if status.host == socket.gethostname() else None
        return self._process

    def _search(self) -> psutil.Process | None:
        now_s = time.monotonic()
        if now_s - self._searched_at < SEARCH_INTERVAL_S:
            return None
        self._searched_at = now_s
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = process.cmdline()
                is_driver = command[-3:-1] == ["-m", "service.run.driver"]
                if is_driver and command[-1].startswith(self.launch) and process.uids().real == os.getuid():
                    return process
        return None

    def _works(self, process: psutil.Process) -> bool:
        """Whether the process used CPU time recently; True until watched long enough."""
        now_s, cpu_s = time.monotonic(), cpu_seconds(process)
        if self._window is None:
            self._window, self._worked_at = (now_s, cpu_s), now_s
        began_at, cpu_before_s = self._window
        if now_s - began_at >= WINDOW_S:
            self._window = (now_s, cpu_s)
            if cpu_s - cpu_before_s >= WORKING_CPU_SHARE * (now_s - began_at):
                self._worked_at = now_s
        return now_s - self._worked_at < IDLE_AFTER_S


def _find_reported_process(status: RunStatus) -> psutil.Process | None:
    """The process that a driver here reported as its own; None if it has ended."""
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(status.pid)
        if abs(float(process.create_time()) - status.created_at) < 1.0:
            return process
    return None
