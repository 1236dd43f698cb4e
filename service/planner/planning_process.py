"""A process that plans a user's module, watched: it ends when it answers, and when its time is over, with all that it
has started."""

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

from moe.spec import Problem, SpecError
from service.planner.request import JobRequest, ModuleRequest, PlannerAnswer, Request

MAX_ANSWER_BYTES = 64 << 20
MAX_OUTPUT_BYTES = 2_000
"""Bytes of the last output of the user's code, which are reported if it ends without an answer."""
LOOK_INTERVAL_S = 0.1


@dataclass(frozen=True)
class PlanningLimits:
    """Limits of one process; without any of them where it is the user's own."""

    timeout_s: float | None = None
    memory_bytes: int | None = None
    stop_event: threading.Event = field(default_factory=threading.Event)
    """Ends it early, once set."""


class PlanningCancellation(Exception):
    """Planning was broken off, for no fault of the module."""


def ask(
    task: JobRequest | ModuleRequest, limits: PlanningLimits, *, shows_output: bool = False
) -> PlannerAnswer:
    """The answer of a process of its own. With `shows_output`, what the user's code prints goes to standard error.

    A module of the command line is looked for in the present folder, too; that of a job only where Python finds what is
    installed.

    Raises SpecError with what is wrong with the module, or where it went beyond a limit; PlanningCancellation.
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
        # A job's module has to be found where jobs run, of which this folder is none.
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
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it may have died at its first import
            stdin.write(request.model_dump_json().encode())
        self._answer, self._output = bytearray(), bytearray()

    def answer(self, path: str, code: str) -> PlannerAnswer:
        try:
            why = self._watch()
        finally:
            self._end()
        status = self._process.returncode
        with suppress(ValidationError):
            if why is None:
                return PlannerAnswer.model_validate_json(bytes(self._answer))
        if why is None:
            output = self._output.decode(errors="replace").strip()
            cause = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            why = f"ended the process that plans it ({cause})" + (f": {output[-500:]}" if output else "")
        raise SpecError(Problem("user_code", path, code, why, "correct the module's code"))

    def _watch(self) -> str | None:
        """Until it has answered or ended; the reason why it must end, else. Raises PlanningCancellation."""
        limits, streams = self._limits, selectors.DefaultSelector()
        streams.register(self._answers, selectors.EVENT_READ, self._answer)
        if self._process.stdout is not None:
            streams.register(self._process.stdout, selectors.EVENT_READ, self._output)
        deadline = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        with streams:
            while True:
                has_ended = self._has_ended()  # before the last look at what it wrote
                for key, _ in streams.select(LOOK_INTERVAL_S):
                    block = os.read(key.fd, 1 << 16)
                    key.data.extend(block)
                    if not block:
                        streams.unregister(key.fileobj)
                        if key.fd == self._answers:
                            return None
                if len(self._answer) > MAX_ANSWER_BYTES:
                    return f"gives a plan of more than {MAX_ANSWER_BYTES:,} bytes"
                del self._output[:-MAX_OUTPUT_BYTES]
                if has_ended:
                    return None
                if limits.stop_event.is_set():
                    raise PlanningCancellation("planning was broken off: this service is stopping")
                if deadline is not None and time.monotonic() > deadline:
                    return f"takes longer than the {limits.timeout_s:g} s that planning may take"

    def _has_ended(self) -> bool:
        """Whether it has; its id stays its own until `_end`."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _end(self) -> None:
        """Ends it with all that it has started, in whatever session."""
        with suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError, PermissionError):  # macOS says that of a group that has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)
        if self._process.stdout is not None:
            self._process.stdout.close()


def _environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The environment without the service's settings, its token among them."""
    variables = {name: value for name, value in environment.items() if not name.startswith("SHARDYARD_")}
    return {**variables, "PYTHONUNBUFFERED": "1"}
