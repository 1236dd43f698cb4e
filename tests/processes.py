"""Processes of this machine: waiting for them, and finding them by their environment."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

DEADLINE_S = 300.0
"""Generous: a machine may be five times slower and busy, and it costs nothing where all goes well."""

LONGEST_PAUSE_S = 0.1

CTRL_C_IN_THE_MIDST = """
import os, signal, subprocess
execute = subprocess.Popen._execute_child

def and_signal(self, *arguments):
    execute(self, *arguments)
    os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen._execute_child = and_signal
"""
"""Put before a program: SIGINT comes when its first process has been started and has no name in it yet."""


def await_that(
    condition: Callable[[], bool], explain: Callable[[], str] = lambda: "", timeout_s: float = DEADLINE_S
) -> None:
    """Return once the condition holds; fail with an explanation when it does not in time.

    The interval grows: each check is mostly a request, which takes CPU time from the process waited for.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)


def heed_ctrl_c() -> None:
    """Restore SIGINT, for `preexec_fn`: processes that a shell starts in the background ignore it, and so do their
    children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """Idle process in its own session, killed afterwards."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Processes with this environment variable and value."""
    return [process for process in psutil.process_iter() if _bears(process, name, value)]


def _bears(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.environ().get(name) == value
    except (psutil.Error, OSError):
        return False
