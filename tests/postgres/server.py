"""A PostgreSQL server (Debian's package) as a process on loopback, with a folder of its own."""

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import await_that


def programs() -> Path | None:
    """Folder of the newest installed server's programs; None without one."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    return folders[-1].parent if folders else None


@pytest.fixture(scope="session")
def server() -> Iterator["PostgresServer"]:
    """One server for all tests of a process; skips where none is installed."""
    if programs() is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    server = PostgresServer()
    yield server
    server.close()


class PostgresServer:
    """A running server. Raises FileNotFoundError if none is installed."""

    def __init__(self) -> None:
        if (bin_folder := programs()) is None:
            raise FileNotFoundError("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
        # The server refuses to run as root, and a folder of the tests' own may be closed to other users.
        self._user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
        shutil.chown(self._folder, self._user)
        data = self._folder / "data"
        self._run(bin_folder / "initdb", "-D", data, "-U", "tester", "--auth=trust", "--no-sync", "--encoding=UTF8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=60", "-c", "unix_socket_directories="]
        self._log = (self._folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [bin_folder / "postgres", "-D", data, "-p", str(self.port), *options], user=self._as_user(),
            stdout=self._log, stderr=self._log, cwd="/",
        )  # fmt: skip
        self._numbers = itertools.count()
        self._psql = bin_folder / "psql"
        await_that(lambda: self._answers("SELECT 1"), lambda: (self._folder / "server.log").read_text())

    def create(self) -> str:
        """SQLAlchemy URL of a new, empty database."""
        name = f"jobs_{next(self._numbers)}"
        assert self._answers(f"CREATE DATABASE {name}")
        return f"postgresql://tester@127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder)

    def _answers(self, statement: str) -> bool:
        command = [
            self._psql,
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-U",
            "tester",
            "-d",
            "postgres",
            "-c",
            statement,
        ]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _run(self, *command: object) -> None:
        subprocess.run([*map(str, command)], check=True, user=self._as_user(), cwd="/", stdout=subprocess.DEVNULL)

    def _as_user(self) -> str | None:
        return self._user if os.geteuid() == 0 else None
