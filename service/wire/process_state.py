"""State of a process on this machine, for detecting stopped ones."""

from contextlib import suppress
from pathlib import Path

import psutil

_FREEZERS = ("__refrigerator", "do_freezer_trap")
"""Kernel functions in which processes of a frozen cgroup wait."""


def state_of(process: psutil.Process) -> str:
    """`stopped` (SIGSTOP), `frozen` (by its cgroup), `gone`, or psutil's status, such as `running` and `sleeping`.
    Raises psutil.NoSuchProcess."""
    if process.status() == psutil.STATUS_STOPPED:
        return "stopped"
    with suppress(OSError):
        if Path(f"/proc/{process.pid}/wchan").read_text().strip() in _FREEZERS:
            return "frozen"
    status = str(process.status())
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time used by a process so far. Raises psutil.NoSuchProcess."""
    times = process.cpu_times()
    return float(times.user + times.system)
