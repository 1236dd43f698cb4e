"""What runs said last, in memory: when anything was heard of them, and their drivers' newest status."""

import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil
from pydantic import ValidationError

from service.wire.events import RecordBatch
from service.wire.run_status import RunStatus

DRIVER_SILENCE_S = 20.0
"""A driver beats once a second; one that has not for so long, while its workers do, is named."""


@dataclass(frozen=True)
class _Status:
    attempt: int
    status: RunStatus
    at: float


class RunStatuses:
    """The newest word of each run, by job. A service that has just started has heard of none."""

    def __init__(self) -> None:
        self._began_at = time.time()
        self._heard_at: dict[str, float] = {}
        self._driver_heard_at: dict[str, tuple[int, float]] = {}
        """Attempt, and time."""
        self._statuses: dict[str, _Status] = {}

    def hear(self, job_id: str, batch: RecordBatch) -> None:
        """Note that a batch came, were it empty."""
        now = time.time()
        self._heard_at[job_id] = now
        if batch.writer == "driver":
            self._driver_heard_at[job_id] = (batch.attempt, now)
            if batch.run is not None:
                with suppress(ValidationError):
                    self._statuses[job_id] = _Status(batch.attempt, RunStatus.model_validate(batch.run), now)

    def heard_at(self, job_id: str) -> float:
        """Time at which a run last sent anything; since when this process listens, where it has not."""
        return self._heard_at.get(job_id, self._began_at)

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        """Forget what other jobs said."""
        tables: tuple[dict[str, Any], ...] = (self._heard_at, self._driver_heard_at, self._statuses)
        for table in tables:
            for job_id in list(table):  # requests write to it at the same time, in threads of their own
                if job_id not in job_ids:
                    table.pop(job_id, None)

    def driver_trouble(self, job_id: str, attempt: int) -> str:
        """Words for a driver that is silent while its workers are heard, or stopped; "" for any other."""
        of_attempt, heard_at = self._driver_heard_at.get(job_id, (0, 0.0))
        if of_attempt != attempt or time.time() - heard_at < DRIVER_SILENCE_S:
            return ""
        known = self._statuses.get(job_id)
        status = known.status if known is not None and known.attempt == attempt else RunStatus()
        workers_heard, stopped = self.heard_at(job_id) - heard_at >= DRIVER_SILENCE_S / 2, _is_stopped(status)
        if not (workers_heard or stopped):
            return ""
        named = f"its driver (process {status.pid} on {status.host})" if status.pid else "its driver"
        what = "is stopped and has sent nothing" if stopped else "has sent nothing"
        since = f"{datetime.fromtimestamp(heard_at, UTC):%Y-%m-%dT%H:%M:%SZ}"
        goes_on = "training goes on, but " if workers_heard else ""
        return f"{named} {what} since {since}: {goes_on}no worker that dies or hangs is replaced until it runs again"

    def view(self, job_id: str, attempt: int) -> dict[str, Any] | None:
        """The status of an attempt for clients, ages as of now; None where its driver has told nothing."""
        known = self._statuses.get(job_id)
        if known is None or known.attempt != attempt:
            return None
        heard_at = self._driver_heard_at.get(job_id, (attempt, known.at))[1]
        shown = known.status.model_dump(mode="json", exclude={"created_at"})
        age_s = max(0.0, time.time() - known.at)
        for rank in shown["ranks"]:
            rank["silent_s"] = round(rank["silent_s"] + age_s, 1)
        return {"silent_s": round(max(0.0, time.time() - heard_at), 1), **shown}


def _is_stopped(status: RunStatus) -> bool:
    """Whether the process is of this machine and stopped, as by SIGSTOP."""
    if status.host != socket.gethostname():
        return False
    try:
        process = psutil.Process(status.pid)
        is_same = abs(float(process.create_time()) - status.created_at) < 1.0
        return is_same and str(process.status()) == str(psutil.STATUS_STOPPED)
    except (psutil.Error, ValueError):
        return False
