"""Processes of this machine that are not children: recorded, found again, signalled."""

import os
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Process:
    """A process identified by pid and start time, since pids are reused."""

    pid: int
    started: float
    name: str = field(default="", compare=False)

    @classmethod
    def from_psutil(cls, process: psutil.Process) -> "Process":
        """Raises psutil.NoSuchProcess."""
        return cls(process.pid, _start_time(process), process.name())

    def find(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            alive = _start_time(process) == self.started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None

    def command(self) -> tuple[str, ...]:
        """Command line; empty if the process is gone."""
        try:
            return tuple(psutil_process.cmdline()) if (psutil_process := self.find()) is not None else ()
        except psutil.NoSuchProcess:
            return ()


def session_members(session: int) -> Iterator[Process]:
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield Process.from_psutil(process)
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue


def session_roots(session: int) -> Iterator[Process]:
    """Members of the session whose parent is outside it."""
    return (process for process in session_members(session) if _is_root(process, session))


def descendants(process: psutil.Process) -> Iterator[Process]:
    try:
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            yield Process.from_psutil(child)
        except psutil.NoSuchProcess:
            continue


def signal_all(processes: Collection[Process], number: signal.Signals) -> None:
    for process in processes:
        if (psutil_process := process.find()) is not None:
            try:
                psutil_process.send_signal(number)
            except psutil.NoSuchProcess:
                continue


def _start_time(process: psutil.Process) -> float:
    """Start time; on Linux in ticks since boot, unaffected by the clock."""
    if not sys.platform.startswith("linux"):
        return process.create_time()
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    return float(fields[19])


def _is_root(process: Process, session: int) -> bool:
    try:
        return os.getsid(psutil.Process(process.pid).ppid()) != session
    except (psutil.NoSuchProcess, ProcessLookupError):
        return True
