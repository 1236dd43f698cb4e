"""Heartbeat of a worker: every two seconds it reports the activity of its training thread to the driver.

A separate thread sends it, so a rank that waits in a collective or computes for an hour still sends heartbeats; a
stopped process does not. The response may request the stacks of all threads, for this rank's log, or say that the
driver's node is about to end. Heartbeats never block training.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from moe.activity import activities, num_begun
from service.run.examine import WORKING_CPU_SHARE, allow_tracing
from service.wire.run_status import DeviceUse

BEAT_INTERVAL_S = 2.0
ANSWER_TIMEOUT_S = 10.0
WORK_WINDOW_S = 10.0
"""Window over which CPU time and I/O are measured."""
WORKING_BYTES_PER_S = 100e3
"""Least I/O of a process that works."""


@dataclass(frozen=True)
class HeartbeatAddress:
    """The driver's address for heartbeats, and its secret."""

    host: str
    port: int
    secret: str = field(repr=False)


class Beat(BaseModel):
    """One heartbeat of a rank."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    phase: str = "start"
    """`moe.activity.Phase` of the training thread's outermost activity."""
    doing: str = "start"
    """Innermost activity, in words."""
    in_collective: bool = False
    for_s: float = 0.0
    """Seconds in the innermost activity."""
    idle_s: float = 0.0
    """Seconds since this process last worked (CPU, I/O, device) or began an activity."""
    step_s: float = 0.0
    """Duration of the last step."""
    device: DeviceUse | None = None


class Introduction(BaseModel):
    """First line of a connection: identifies the process that sends heartbeats."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    secret: str
    rank: int
    pid: int
    created_at: float
    """Creation time by the system's clock; unique together with the pid."""
    node: str
    """Ray's id of the node."""
    address: str = ""
    """The node's address in the cluster."""
    host: str


class Heartbeat:
    """Heartbeat of this process, from `start` until `stop`."""

    def __init__(self, address: HeartbeatAddress, rank: int, node: str, node_address: str = "") -> None:
        self._address = address
        self._introduction = Introduction(
            secret=address.secret, rank=rank, pid=os.getpid(), created_at=psutil.Process().create_time(),
            node=node, address=node_address, host=socket.gethostname(),
        )  # fmt: skip
        self._training_thread: int | None = None
        self._log: Callable[[str, str], None] | None = None
        self._meter = WorkMeter()
        self._answered_at: float | None = None
        self.driver_is_ending = False
        """Whether the driver's node is about to end, as it last answered."""
        self.step_s = 0.0
        """Duration of the last step, set by the training loop's recorder."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, log: Callable[[str, str], None]) -> None:
        """Report the calling thread's activities from now on; `log` receives (level, text)."""
        self._training_thread, self._log = threading.get_ident(), log

    def unfollow(self) -> None:
        """Stop reporting that thread's activities and writing to its log."""
        self._training_thread = self._log = None

    def stop(self) -> None:
        self._stopping.set()

    def unanswered_s(self) -> float:
        """Seconds since the driver last answered; 0 if it never has."""
        return 0.0 if self._answered_at is None else time.monotonic() - self._answered_at

    def beat(self) -> Beat:
        """The heartbeat of this moment."""
        open_activities = activities(self._training_thread) if self._training_thread is not None else ()
        idle_s, device = self._meter.idle_s(), device_use()
        if not open_activities:
            return Beat(idle_s=idle_s, device=device)
        innermost = open_activities[-1]
        return Beat(
            phase=open_activities[0].phase, doing=str(innermost), in_collective=innermost.phase == "collective",
            for_s=time.monotonic() - innermost.began_at, idle_s=idle_s, step_s=self.step_s, device=device,
        )  # fmt: skip

    def _run(self) -> None:
        while not self._stopping.is_set():
            # Any failure is harmless: without heartbeats, the driver examines this process and finds that it works.
            with suppress(Exception):
                self._beat_until_broken()
            self._stopping.wait(BEAT_INTERVAL_S)

    def _beat_until_broken(self) -> None:
        with socket.create_connection((self._address.host, self._address.port), ANSWER_TIMEOUT_S) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            answers = connection.makefile("rb")
            connection.sendall(self._introduction.model_dump_json().encode() + b"\n")
            while not self._stopping.is_set():
                connection.sendall(self.beat().model_dump_json(exclude_none=True).encode() + b"\n")
                answer = answers.readline(1000)
                if not answer:
                    return
                self._answered_at = time.monotonic()
                fields = json.loads(answer)
                self.driver_is_ending = fields.get("ending") is True
                if fields.get("stacks"):
                    self._log_stacks()
                self._stopping.wait(BEAT_INTERVAL_S)

    def _log_stacks(self) -> None:
        if self._log is not None:
            self._log("warning", f"stacks of this process, rank {self._introduction.rank}:\n{stacks()}")


class WorkMeter:
    """Measures how long this process has been idle."""

    def __init__(self) -> None:
        self._window = self._counts()
        self._num_begun = num_begun()
        self._worked_at = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last work; to be called every few seconds."""
        now_s, num_activities = time.monotonic(), num_begun()
        if num_activities != self._num_begun or device_is_busy():
            self._num_begun, self._worked_at = num_activities, now_s
        if now_s - self._window[0] >= WORK_WINDOW_S:
            (before_s, cpu_before, bytes_before), self._window = self._window, self._counts()
            seconds = self._window[0] - before_s
            works = (
                self._window[1] - cpu_before >= WORKING_CPU_SHARE * seconds
                or self._window[2] - bytes_before >= WORKING_BYTES_PER_S * seconds
            )
            if works:
                self._worked_at = now_s
        return now_s - self._worked_at

    @staticmethod
    def _counts() -> tuple[float, float, float]:
        """(time, CPU seconds, I/O bytes) of this process and its descendants."""
        this_process = psutil.Process()
        cpu_s, num_bytes = 0.0, 0.0
        for process in (this_process, *this_process.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                cpu_s += times.user + times.system
                io_counters = getattr(process, "io_counters", None)  # not on every system
                if io_counters is not None:
                    counters = io_counters()
                    num_bytes += getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
        return time.monotonic(), cpu_s, num_bytes


def device_is_busy() -> bool:
    """Whether this process's GPU is in use."""
    use = device_use()
    return use is not None and bool(use.utilization)


def stacks() -> str:
    """Stacks of all threads of this process, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


_heartbeats: list[Heartbeat] = []


def begin_heartbeat(address: HeartbeatAddress, rank: int, node: str, node_address: str) -> None:
    """Start the heartbeat of this worker process on a node (Ray's id, address)."""
    allow_tracing()
    heartbeat = Heartbeat(address, rank, node, node_address)
    _heartbeats[:] = [heartbeat]
    heartbeat.start()


def heartbeat_of_process() -> Heartbeat | None:
    """The heartbeat that `begin_heartbeat` started; None in a process without one."""
    return _heartbeats[0] if _heartbeats else None


def device_use() -> DeviceUse | None:
    """Use of this process's GPU; None on a CPU or before its initialization."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    try:
        free, total = cuda.mem_get_info()
        return DeviceUse(utilization=_utilization(cuda), memory_bytes=total - free, memory_total_bytes=total)
    except Exception:  # a failing GPU driver must not stop heartbeats
        return None


def _utilization(cuda: Any) -> float | None:
    try:
        nvml, handle = _handle(str(cuda.get_device_properties(cuda.current_device()).uuid))
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except Exception:
        return None


@cache
def _handle(uuid: str) -> tuple[Any, Any]:
    """(NVML, the GPU's handle), from Ray's vendored bindings: torch needs another package."""
    from ray._private.thirdparty import pynvml

    pynvml.nvmlInit()  # type: ignore[no-untyped-call]
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
