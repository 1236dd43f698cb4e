"""Process of a silent driver, where it is of this machine: found, looked at, and ended if it is frozen."""

import os
import socket
import time
from contextlib import suppress

import psutil

from service.control.report.silent_driver import ProcessState
from service.wire.process_state import cpu_seconds, state_of
from service.wire.run_status import RunStatus

SEARCH_INTERVAL_S = 10.0
"""Between searches among all processes for a driver that has not said which it is."""
IDLE_AFTER_S, WINDOW_S, WORKING_CPU_SHARE = 60.0, 5.0, 0.02
"""A process is idle that for so long took less of a core, measured over windows of so many seconds."""


class DriverProcess:
    """One attempt's."""

    def __init__(self, launch: str) -> None:
        """`launch`: the beginning of the path of the attempt's launch, which its driver has on its command line."""
        self.launch = launch
        self._process: psutil.Process | None = None
        self._searched_at = -float("inf")
        self._window: tuple[float, float] | None = None
        """When it began, and the CPU seconds by then."""
        self._worked_at = 0.0

    def look(self, status: RunStatus | None) -> tuple[ProcessState, str]:
        """(state, process in words); `status` is what the driver said of itself."""
        process = self._find(status)
        if process is None:
            named = f"process {status.pid} on {status.host}" if status is not None and status.pid else ""
            return "unseen", named
        named = f"process {process.pid} on {socket.gethostname()}"
        try:
            state = state_of(process)
            if state in ("stopped", "frozen"):
                return "stopped", named
            if state == "gone":
                return "unseen", named
            if state == psutil.STATUS_TRACING_STOP:  # in somebody's debugger
                return "working", named
            return ("working" if self._works(process) else "idle"), named
        except psutil.Error:
            return "unseen", named

    def end(self, status: RunStatus | None) -> bool:
        """SIGKILL; False where the process is not of this machine."""
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
                self._process = _told(status) if status.host == socket.gethostname() else None
        return self._process

    def _search(self) -> psutil.Process | None:
        now = time.monotonic()
        if now - self._searched_at < SEARCH_INTERVAL_S:
            return None
        self._searched_at = now
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = process.cmdline()
                is_driver = command[-3:-1] == ["-m", "service.run.driver"]
                if is_driver and command[-1].startswith(self.launch) and process.uids().real == os.getuid():
                    return process
        return None

    def _works(self, process: psutil.Process) -> bool:
        """Whether it took CPU time of late; until it has been watched for a while, it may."""
        now, cpu_s = time.monotonic(), cpu_seconds(process)
        if self._window is None:
            self._window, self._worked_at = (now, cpu_s), now
        began_at, cpu_before_s = self._window
        if now - began_at >= WINDOW_S:
            self._window = (now, cpu_s)
            if cpu_s - cpu_before_s >= WORKING_CPU_SHARE * (now - began_at):
                self._worked_at = now
        return now - self._worked_at < IDLE_AFTER_S


def _told(status: RunStatus) -> psutil.Process | None:
    """The process that a driver of this machine said it is."""
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(status.pid)
        if abs(float(process.create_time()) - status.created_at) < 1.0:
            return process
    return None
