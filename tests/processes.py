"""What runs on this machine: waited for, and found by what it was given."""

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
    """Returns once the condition holds; fails with an explanation when it does not in time.

    It looks often at first and less often later: a look is a request mostly, and takes cores from what is waited for.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)


def heed_ctrl_c() -> None:
    """For `preexec_fn`. What a shell starts in the background ignores SIGINT, and its children do, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, in a session of its own; gone afterwards."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def with_environment(name: str, value: str) -> list[psutil.Process]:
    """Processes that have this variable with this value."""
    return [process for process in psutil.process_iter() if _bears(process, name, value)]


def _bears(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.environ().get(name) == value
    except (psutil.Error, OSError):
        return False
