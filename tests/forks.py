"""Processes forked from one that has imported their program, which is most of a start.

Each is an ordinary process with its own pid and environment; it can be signalled and waited for.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, Any

from tests.processes import DEADLINE_S


class Fork:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._said = connection, connection.makefile("rb")
        self.returncode: int | None = None
        self.pid = int(self._said.readline())

    def poll(self) -> int | None:
        return self._await_code(0)

    def wait(self, timeout: float = DEADLINE_S) -> int:
        code = self._await_code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _await_code(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            self.returncode = int(self._said.readline())
            self._said.close()
            self._connection.close()
        return self.returncode


class Forks:
    """Server process that has imported a program, `module:function`, and `modules` that it imports late, and forks
    it."""

    def __init__(self, program: str, *modules: str) -> None:
        self._program = program
        self._requests, server_end = socket.socketpair()
        with server_end:
            command = [sys.executable, "-m", "tests.fork_server", str(server_end.fileno())]
            self._server = subprocess.Popen(
                [*command, program.partition(":")[0], *modules], pass_fds=[server_end.fileno()]
            )
        atexit.register(self._close)

    def start(
        self,
        arguments: Sequence[str],
        *,
        out: IO[Any],
        errors: IO[Any] | None = None,
        stdin: IO[Any] | None = None,
        environment: Mapping[str, str] = os.environ,
        session: bool = False,
    ) -> Fork:
        """Run the program with these arguments, optionally in its own session: it reads `stdin` (empty by default) and
        writes to `out` and `errors` (by default `out`)."""
        request = {
            "arguments": [self._program, *arguments], "environment": dict(environment), "session": session,
        }  # fmt: skip
        client_end, process_end = socket.socketpair()
        with process_end, open(os.devnull, "rb") as null:
            streams = [stream.fileno() for stream in (stdin or null, out, errors or out)]
            socket.send_fds(self._requests, [b"1"], [process_end.fileno(), *streams])
        client_end.sendall(json.dumps(request).encode() + b"\n")
        return Fork(client_end)

    def _close(self) -> None:
        self._requests.close()
        self._server.wait()


@cache
def forks(program: str, *modules: str) -> Forks:
    """The server of a program, one per process."""
    return Forks(program, *modules)
