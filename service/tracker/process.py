"""Parent's side of the tracker process."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress

from pydantic import ValidationError

from service.tracker.messages import TrackerOrder, TrackerReply

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "GOMAXPROCS": "1",
    "GOGC": "400",
}
"""Environment of libraries: no telemetry; errors soon, since calls are repeated here; and little processor time, by one
thread and fewer garbage collections, for W&B's process in Go."""


class TrackerProcess:
    """Process that writes to trackers; ends with `end` or with this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "service.tracker.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(os.environ), start_new_session=True,
        )  # fmt: skip
        self._replies = queue.SimpleQueue[TrackerReply]()
        self._reader = threading.Thread(target=self._read, name="tracker-replies", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def status(self) -> str:
        """Exit status or signal that ended it, in words."""
        code = self._process.poll() or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def tell(self, order: TrackerOrder) -> None:
        """Send an order. One that a dead process does not take is lost, like those that it had not confirmed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(order.model_dump_json(exclude_defaults=True).encode() + b"\n")
            self._process.stdin.flush()

    def replies(self) -> list[TrackerReply]:
        """Replies since the last call."""
        replies = []
        with suppress(queue.Empty):
            while True:
                replies.append(self._replies.get_nowait())
        return replies

    def end(self) -> None:
        """Kill it with the processes that its libraries started, and wait."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                with suppress(ValidationError):
                    self._replies.put(TrackerReply.model_validate_json(line))


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment without the service's settings, which include its token. Trackers read their keys here."""
    return {**_QUIET, **{name: value for name, value in environment.items() if not name.startswith("SHARDYARD_")}}
