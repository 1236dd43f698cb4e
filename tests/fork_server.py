"""Server of `tests.forks`: imports a program, and forks a process for each request."""

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

STANDARD_STREAMS = 3


def serve(requests: socket.socket) -> None:
    """Answer requests until the client is gone. Also returns in the forked processes, which then run the program."""
    gc.collect()
    gc.freeze()  # pages of existing objects stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for keepers
    while (message := socket.recv_fds(requests, 1, 1 + STANDARD_STREAMS))[0]:
        connection, *streams = message[1]
        if os.fork() == 0:
            requests.close()
            keep(socket.socket(fileno=connection), streams)
            return
        for descriptor in (connection, *streams):
            os.close(descriptor)


def keep(connection: socket.socket, streams: Sequence[int]) -> None:
    """Fork one process; report its pid and, at its end, its exit code. Also returns in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection, connection.makefile("rb") as lines:
        request = lines.readline()
        if (pid := os.fork()) != 0:
            for descriptor in streams:
                os.close(descriptor)
            try:
                connection.sendall(b"%d\n" % pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.sendall(b"%d\n" % code)
            finally:
                os._exit(0)
    become(json.loads(request), streams)


def become(request: dict, streams: Sequence[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup runs the tests
    if request["session"]:
        os.setsid()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]


def main() -> None:
    requests, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    server = os.getpid()
    serve(socket.socket(fileno=int(requests)))
    if os.getpid() != server:
        module, _, name = sys.argv[0].partition(":")
        getattr(importlib.import_module(module), name)()


if __name__ == "__main__":
    main()
