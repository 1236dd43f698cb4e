"""A supervised process that plans a user's module, killed with its descendants."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from pydantic import ValidationError

from moe.spec import Problem, SpecError, spec_error
from service.planner.request import JobRequest, ModuleRequest, PlannerAnswer, Request

MAX_ANSWER_BYTES = 64 << 20
MAX_OUTPUT_BYTES = 2_000
"""Last output of the user's code, reported if there is no answer."""
LOOK_INTERVAL_S = 0.1


@dataclass(frozen=True)
class PlanningLimits:
    """Limits of one process; none by default, for a user's own module."""

    timeout_s: float | None = None
    memory_bytes: int | None = None
    stop_event: threading.Event = field(default_factory=threading.Event)
    """Cancels the planning when set."""


class PlanningCancellation(Exception):
    """Planning was cancelled, through no fault of the module."""


def ask(task: JobRequest | ModuleRequest, limits: PlanningLimits, *, shows_output: bool = False) -> PlannerAnswer:
    """Plan in a separate process. `shows_output`: the user code's output goes to standard error. A command line's
    module may be in the current folder, a job's must be installed.

    Raises SpecError for faults of the module and exceeded limits; PlanningCancellation.
    """
    is_job = isinstance(task, JobRequest)
    request = Request(
        job=task if isinstance(task, JobRequest) else None,
        module=task if isinstance(task, ModuleRequest) else None,
        timeout_s=limits.timeout_s,
        memory_bytes=limits.memory_bytes,
        parent_pid=os.getpid(),
    )
    path = "model.build" if is_job else "--module"
    code = str(task.spec.model.build) if isinstance(task, JobRequest) else task.build  # type: ignore[union-attr]
    answer = _Child(request, limits, shows_output).answer(path, code)
    if answer.problems:
        raise SpecError([Problem(**fields) for fields in answer.problems])
    return answer


class _Child:
    def __init__(self, request: Request, limits: PlanningLimits, shows_output: bool) -> None:
        self._limits = limits
        # A job's module must be importable where jobs run, not only in this folder.
        flags = ["-P"] if request.job is not None else []
        self._answers, child_descriptor = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-m", "service.planner.child", str(child_descriptor)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr if shows_output else subprocess.PIPE,
                stderr=sys.stderr if shows_output else subprocess.STDOUT,
                pass_fds=(child_descriptor,),
                env=_environment(os.environ),
                start_new_session=True,
            )
        finally:
            os.close(child_descriptor)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it may have died while importing
            stdin.write(request.model_dump_json().encode())
        self._answer, self._output = bytearray(), bytearray()

    def answer(self, path: str, code: str) -> PlannerAnswer:
        try:
            fault = self._watch()
        finally:
            self._end()
        status = self._process.returncode
        with suppress(ValidationError):
            if fault is None:
                return PlannerAnswer.model_validate_json(bytes(self._answer))
        if fault is None:
            output = self._output.decode(errors="replace").strip()
            cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            fault = f"crashed the process that plans it ({cause})" + (f": {output[-500:]}" if output else "")
        raise spec_error("user_code", path, code, fault, "correct the module's code")

    def _watch(self) -> str | None:
        """Wait for the answer or the end; returns why to kill the process, if so. Raises PlanningCancellation."""
        limits, streams = self._limits, selectors.DefaultSelector()
        streams.register(self._answers, selectors.EVENT_READ, self._answer)
        if self._process.stdout is not None:
            streams.register(self._process.stdout, selectors.EVENT_READ, self._output)
        deadline = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        with streams:
            while True:
                has_ended = self._has_ended()  # before the last read of its output
                for key, _ in streams.select(LOOK_INTERVAL_S):
                    block = os.read(key.fd, 1 << 16)
                    key.data.extend(block)
                    if not block:
                        streams.unregister(key.fileobj)
                        if key.fd == self._answers:
                            return None
                if len(self._answer) > MAX_ANSWER_BYTES:
                    return f"has a plan of more than {MAX_ANSWER_BYTES:,} bytes"
                del self._output[:-MAX_OUTPUT_BYTES]
                if has_ended:
                    return None
                if limits.stop_event.is_set():
                    raise PlanningCancellation("planning was cancelled: this service is stopping")
                if deadline is not None and time.monotonic() > deadline:
                    return f"exceeds the planning time limit of {limits.timeout_s:g} s"

    def _has_ended(self) -> bool:
        """Whether it has ended; `WNOWAIT` keeps its pid reserved until `_end`."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end(self) -> None:
        """Kill the process and all its descendants, in any session."""
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError, PermissionError):  # macOS raises it for a group that has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Environment without the service's settings, which include its token."""
    variables = {name: value for name, value in environment.items() if not name.startswith("SHARDYARD_")}
    return {**variables, "PYTHONUNBUFFERED": "1"}
