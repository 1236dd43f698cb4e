"""The command on a terminal of its own."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator

from tests.processes import DEADLINE_S
from tests.service_cli.command import COMMAND, environment

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
ROWS = 40


def on_a_terminal(columns: int, *arguments: str, url: str, **overrides: str) -> tuple[int, str]:
    """Exit code and everything that the command wrote to a terminal of that width."""
    controller_fd, terminal_fd = pty.openpty()
    fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    env = environment(url)
    del env["COLUMNS"], env["NO_COLOR"]
    env |= {"TERM": "xterm-256color", **overrides}
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, env=env
    )
    os.close(terminal_fd)
    with os.fdopen(controller_fd, "rb", buffering=0) as screen:
        output = b"".join(_until_closed(screen))
    return process.wait(DEADLINE_S), output.decode()


def plain(output: str) -> list[str]:
    """The lines of an output without its escape codes."""
    return [line.rstrip() for line in ESCAPE.sub("", output).replace("\r", "").splitlines()]


def _until_closed(screen) -> Iterator[bytes]:  # type: ignore[no-untyped-def]
    while True:
        try:
            chunk = screen.read(65536)
        except OSError:  # EIO: the other end is closed
            return
        if not chunk:
            return
        yield chunk
