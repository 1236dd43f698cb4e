"""Examination of a worker process on its own node: state, CPU time, stack.

A process without heartbeats is killed only if it does no work: if it is stopped, or if the watchdog has given up its
group and it uses no CPU time.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict

from service.wire.process_state import cpu_seconds, state_of

WORKING_CPU_SHARE = 0.05
"""CPU seconds per second of a working process; threads that wait, send and seal use less."""
BETWEEN_LOOKS_S = 1.0
STACK_TIMEOUT_S = 10.0
REMOTE_TIMEOUT_S = 20.0
MAX_STACK_CHARS = 20_000
ATTEMPT_VARIABLE = "SHARDYARD_ATTEMPT"
"""Environment variable with the submission id, which identifies workers before their first heartbeat."""

Ending = Literal["never", "if_stopped", "if_idle"]
"""Condition for killing an examined process; a stopped process is also idle."""


class ProcessSample(BaseModel):
    """State of a process, from two samples a second apart."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int = 0
    state: str
    """"stopped", "frozen", "gone", or the system's: "running", "sleeping", "disk-sleep"."""
    cpu_share: float = 0.0
    """CPU seconds per second between the samples."""
    stack: str = ""
    ended: bool = False
    """Whether the process was killed."""

    def __str__(self) -> str:
        match self.state:
            case "stopped":
                return "is stopped by a signal (SIGSTOP)"
            case "frozen":
                return "is frozen with its control group"
            case "gone":
                return "is gone"
            case _:
                return f"is {self.state} and uses {self.cpu_share:.0%} of a CPU"


def examine(pid: int, created_at: float, ending: Ending) -> ProcessSample:
    """Examine a process of this machine, and kill it if `ending` applies."""
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - created_at) > 1.0:
            return ProcessSample(state="gone")
        before, cpu_before_s = state_of(process), cpu_seconds(process)
        began = time.monotonic()
        time.sleep(BETWEEN_LOOKS_S)  # interval over which CPU time is measured
        state = state_of(process)
        cpu_share = (cpu_seconds(process) - cpu_before_s) / (time.monotonic() - began)
        is_stopped = state == before and state in ("stopped", "frozen")
        stack = _stack(pid)
        is_idle = is_stopped or cpu_share < WORKING_CPU_SHARE
        must_end = (ending == "if_stopped" and is_stopped) or (ending == "if_idle" and is_idle)
        if must_end:
            process.kill()
        return ProcessSample(pid=pid, state=state, cpu_share=cpu_share, stack=stack, ended=must_end)
    except psutil.NoSuchProcess:
        return ProcessSample(state="gone")


def end_stopped(attempt: str) -> list[ProcessSample]:
    """Kill an attempt's stopped workers on this machine, even without a heartbeat."""
    looks = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.environ().get(ATTEMPT_VARIABLE) == attempt
            if is_ours and state_of(process) in ("stopped", "frozen"):
                looks.append(examine(process.pid, process.create_time(), "if_stopped"))
    return [look for look in looks if look.ended]


def end_stopped_on(nodes: Sequence[str], attempt: str) -> list[ProcessSample]:
    """Kill an attempt's stopped workers on nodes of this Ray cluster. Raises Ray's error on timeout."""
    looks: list[ProcessSample] = []
    for node in nodes:
        looks += _run_on(node, _end_stopped_plain, attempt)
    return looks


def examine_on(node: str, processes: Sequence[tuple[int, float]], ending: Ending) -> list[ProcessSample]:
    """Examine processes (pid, creation time) on a node of this Ray cluster. Raises Ray's error on timeout."""
    return _run_on(node, _examine_plain, list(processes), ending)


def _run_on(node: str, look: Callable[..., list[dict[str, Any]]], *arguments: Any) -> list[ProcessSample]:
    """Run `look` on a node; directly if it is this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node == ray.get_runtime_context().get_node_id():
        plain = look(*arguments)
    else:
        strategy: Any = NodeAffinitySchedulingStrategy(node, soft=False)
        remote: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(look)
        plain = ray.get(remote.remote(*arguments), timeout=REMOTE_TIMEOUT_S)
    return list(map(ProcessSample.model_validate, plain))


def allow_tracing() -> None:
    """Let this user's processes read this one's stack, also under Yama ptrace restrictions."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_ptracer, anyone = 0x59616D61, -1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_ptracer, ctypes.c_ulong(anyone), 0, 0, 0)


def _examine_plain(processes: list[tuple[int, float]], ending: Ending) -> list[dict[str, Any]]:
    with ThreadPoolExecutor() as pool:  # each examination takes more than a second
        looks = list(pool.map(lambda process: examine(process[0], process[1], ending), processes))
    return [look.model_dump() for look in looks]


def _end_stopped_plain(attempt: str) -> list[dict[str, Any]]:
    return [look.model_dump() for look in end_stopped(attempt)]


def _stack(pid: int) -> str:
    """Python stacks of a process's threads, or why they cannot be read."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return "(no stack: py-spy is not installed)"
    try:
        dump = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=STACK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stack: {error})"
    text = dump.stdout if dump.returncode == 0 else f"(no stack: {dump.stderr.strip()})"
    return text[:MAX_STACK_CHARS]
