"""Memory of a program and its descendants, measured while it runs."""

import os
import threading
import time
from types import TracebackType

import psutil

SAMPLE_INTERVAL_S = 1.0
MAX_SHARE_OF_TIME = 0.02
"""Most of a core that measuring may use: a sample of 30 processes takes 0.1 s."""
MARK = "FOOTPRINT_OF_SHARDYARD"
"""Environment variable that marks a process and its descendants. Not a `SHARDYARD_` one, which Ray would not get."""


class Footprint:
    """Peak memory of the processes with `mark` and their descendants, as proportional set size (PSS) where
    available."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.peak_bytes = 0
        self.peak_processes = 0
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="footprint", daemon=True)
        self._has_mark: dict[psutil.Process, bool] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __enter__(self) -> "Footprint":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        took_s = 0.0
        while not self._stop.wait(max(SAMPLE_INTERVAL_S, took_s / MAX_SHARE_OF_TIME)):
            began = time.thread_time()
            self.sample()
            took_s = time.thread_time() - began

    def sample(self) -> None:
        """Measure once."""
        sizes = [_num_bytes(process) for process in self._processes()]
        total = sum(sizes)
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_processes = total, sum(size > 0 for size in sizes)

    def _processes(self) -> list[psutil.Process]:
        living = list(psutil.process_iter(["ppid"]))
        parents = {process.pid: process.info["ppid"] for process in living}
        self._has_mark = {process: self._has_mark.get(process) or self._bears(process) for process in living}
        marked_pids = {process.pid for process, bears in self._has_mark.items() if bears} | {os.getpid()}
        return [process for process in living if _descends(process.pid, marked_pids, parents)]

    def _bears(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARK) == self.mark)
        except (psutil.Error, OSError):  # gone, or of another user
            return False


def _descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    """Whether `pid` is in or descends from `ancestors`. Ray's workers overwrite their environment."""
    seen_pids = set[int]()
    while pid and pid not in seen_pids:
        if pid in ancestors:
            return True
        seen_pids.add(pid)
        pid = parents.get(pid, 0)
    return False


def _num_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except (psutil.Error, OSError):
        return 0
    return int(getattr(memory, "pss", memory.rss))
