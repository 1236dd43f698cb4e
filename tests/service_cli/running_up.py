"""`shardyard up` as a process of its own, on real Ray or on a stand-in for it."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from service.cli import ray_jobs
from service.cli.main import main
from service.head import ray_start
from tests.forks import forks
from tests.processes import DEADLINE_S
from tests.procs.stand_in_ray import STAND_IN
from tests.service_cli.command import environment

NUMBERS = count()
WITH_RAY = "service.cli.main:main"
WITHOUT_RAY = "tests.service_cli.running_up:without_ray"
"""The command with a stand-in for Ray, which may take its time to list its jobs."""
IMPORTED_LATE = ("service.head.keeper", "service.control.launcher.ray_jobs", "service.control.server")


def without_ray() -> None:
    ray_jobs.TIMEOUT_S = DEADLINE_S
    ray_start.RAY = STAND_IN
    main()


class Up:
    """A running `shardyard up`."""

    def __init__(self, state_dir: Path, *arguments: str, program: str = WITH_RAY) -> None:
        self.log_path = state_dir.with_suffix(f".{next(NUMBERS)}.log")
        with self.log_path.open("wb") as log:
            self.process = forks(program, *IMPORTED_LATE).start(
                ["up", "--port=0", f"--state-dir={state_dir}", *arguments],
                out=log, environment=environment(), session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def await_text(self, pattern: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while (match := re.search(pattern, self.log)) is None:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return match[1] if match.groups() else match[0]

    def url(self) -> str:
        """Its URL, once it serves."""
        return self.await_text(r"API +(http://\S+)")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@contextmanager
def up(state_dir: Path, *arguments: str, program: str = WITH_RAY) -> Iterator[Up]:
    service = Up(state_dir, *arguments, program=program)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop(signal.SIGKILL)
