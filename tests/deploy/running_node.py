"""`docker/run_unprivileged.sh` as its own process: the overlay `local` on this machine, from a built image."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from service.client import Client
from tests.deploy.deployment import ROOT
from tests.processes import await_that

START_LIMIT_S = 900.0
"""On a busy machine imports alone take minutes."""
STOP_LIMIT_S = 120.0
READY = re.compile(r"all pods are ready; API (\S+), token in (\S+)")


class RunningNode:
    """Running from the start on; `close` ends it."""

    def __init__(self, image: str, folder: Path, num_workers: int) -> None:
        self._output = folder / "output"
        script = [ROOT / "docker" / "run_unprivileged.sh", image, f"--workers={num_workers}", "--port=0"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*script, f"--folder={folder}"], stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "PYTHON": sys.executable},
            )  # fmt: skip

    def client(self) -> Client:
        """Client of its control plane, once all pods are ready."""
        await_that(
            lambda: READY.search(self.output()) is not None or self.process.poll() is not None,
            self.output, START_LIMIT_S,
        )  # fmt: skip
        ready = READY.search(self.output())
        assert ready is not None, self.output()
        return Client(ready[1], Path(ready[2]).read_text())

    def output(self) -> str:
        return self._output.read_text()

    def first_process(self, pod: str, container: str) -> psutil.Process:
        """First process of a running container; what ends it ends the container."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a probe that has ended
                if process.cmdline()[-1:] == [f"{pod}.{container}"]:  # crun's own
                    (first,) = process.children()
                    return first
        raise AssertionError(f"no container {container} of {pod} runs:\n{self.output()}")

    def num_starts(self, pod: str, container: str) -> int:
        return self.output().count(f"{pod}: container {container} started")

    def num_ready(self, pod: str) -> int:
        return self.output().count(f"{pod}: ready")

    def close(self) -> list[psutil.Process]:
        """End it, and return those of its processes that still run."""
        if self.process.poll() is not None:
            return []
        processes = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_LIMIT_S)
        finally:
            self.process.kill()  # its containers end with it
            self.process.wait()
        return [process for process in processes if process.is_running()]
