"""Limited processes: work on a user's files within bounded time and memory."""

import resource
import subprocess
import sys
from pathlib import Path

import moe

_SOURCE_FOLDER = str(Path(moe.__file__).resolve().parents[1])
_MAX_MESSAGE_BYTES = 300


class LimitedProcessError(Exception):
    """The process gave no answer; the message says why."""


def run_limited(module: str, request: bytes, *, timeout_s: float, memory_bytes: int) -> bytes:
    """Standard output of `python -m MODULE` with `request` on its standard input.

    The process is a new interpreter without this one's environment, which holds credentials. The module must call
    `take_limits` first. Raises LimitedProcessError if the process exceeds a limit or fails.
    """
    environment = {"PYTHONPATH": _SOURCE_FOLDER, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-P", "-m", module, str(memory_bytes), str(int(timeout_s) + 1)]
    try:
        process = subprocess.run(
            command, input=request, capture_output=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise LimitedProcessError(f"exceeds its time limit of {timeout_s:g} s") from None
    if process.returncode:
        message = process.stderr[-_MAX_MESSAGE_BYTES:].decode(errors="replace").strip().rpartition("\n")[2]
        cause = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
        raise LimitedProcessError(f"crashes its reader ({cause}{': ' + message if message else ''})")
    return process.stdout


def apply_limits() -> None:
    """Apply the limits in the process's arguments, before the module reads anything."""
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
