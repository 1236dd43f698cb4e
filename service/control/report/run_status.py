"""Last messages of runs, in memory."""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from moe.activity import Phase
from service.control.report.driver_process import DriverProcess
from service.control.report.silent_driver import SILENCE_S, SilentDriver
from service.wire.events import RecordBatch
from service.wire.run_status import RunStatus

FRESH_S = 60.0
"""Age at which a status is outdated."""
EVALUATION: Phase = "evaluation"


@dataclass(frozen=True)
class _Status:
    attempt: int
    status: RunStatus
    received_at: float


class RunStatuses:
    """Newest message of each run, by job."""

    def __init__(self) -> None:
        self._began_at = time.time()
        self._heard_at: dict[str, float] = {}
        self._driver_heard_at: dict[str, tuple[int, float]] = {}
        """(attempt, time)."""
        self._statuses: dict[str, _Status] = {}
        self._silences: dict[str, tuple[float, float]] = {}
        """(time since the driver answered its first worker, time of the report)."""
        self._examined_since: dict[str, tuple[int, float]] = {}
        """(attempt, time of the first `silent_driver` call for it)."""
        self._processes: dict[str, DriverProcess] = {}

    def record_batch(self, job_id: str, batch: RecordBatch) -> None:
        """Note that a batch arrived, even an empty one."""
        now_s = time.time()
        self._heard_at[job_id] = now_s
        if batch.writer == "driver":
            self._driver_heard_at[job_id] = (batch.attempt, now_s)
            if batch.run is not None:
                with suppress(ValidationError):
                    self._statuses[job_id] = _Status(batch.attempt, RunStatus.model_validate(batch.run), now_s)
        elif batch.driver_silent_s is not None:
            self._silences[job_id] = (batch.driver_silent_s, now_s)

    def heard_at(self, job_id: str) -> float:
        """Time of the run's last message, or of this service's start."""
        return self._heard_at.get(job_id, self._began_at)

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        """Forget the statuses of all other jobs."""
        tables: tuple[dict[str, Any], ...] = (
            self._heard_at, self._driver_heard_at, self._statuses, self._silences, self._examined_since,
            self._processes,
        )  # fmt: skip
        for table in tables:
            for job_id in list(table):  # request threads write to it concurrently
                if job_id not in job_ids:
                    table.pop(job_id, None)

    def silent_driver(self, job_id: str, attempt: int, launch: str) -> SilentDriver | None:
        """The driver of a running attempt if it is stopped, or silent while its workers are heard; else None.
        `launch`: path prefix of its launch file."""
        now_s = time.time()
        examined_attempt, examined_since = self._examined_since.setdefault(job_id, (attempt, now_s))
        if examined_attempt != attempt:
            examined_since = now_s
            self._examined_since[job_id] = (attempt, now_s)
        heard_attempt, heard_at = self._driver_heard_at.get(job_id, (0, 0.0))
        # This service never heard the driver: either the service has just started, or the driver froze before its first
        # message.
        since = heard_at if heard_attempt == attempt else examined_since
        if now_s - since < SILENCE_S:
            return None
        process = self._process(job_id, launch)
        state, description = process.look(self._status(job_id, attempt))
        workers_heard = self.heard_at(job_id) - since >= SILENCE_S / 2
        if state != "stopped" and not workers_heard:
            return None
        unanswered_s, reported_at = self._silences.get(job_id, (0.0, 0.0))
        if now_s - reported_at >= SILENCE_S or reported_at < since:
            unanswered_s = 0.0
        return SilentDriver(
            since, now_s - since, state, description, process.stopped_s(), workers_heard, unanswered_s
        )  # fmt: skip

    def end_driver(self, job_id: str, attempt: int, launch: str) -> bool:
        """Send SIGKILL to an attempt's driver process. False if it is not on this machine."""
        return self._process(job_id, launch).end(self._status(job_id, attempt))

    def _process(self, job_id: str, launch: str) -> DriverProcess:
        process = self._processes.get(job_id)
        if process is None or process.launch != launch:
            process = self._processes[job_id] = DriverProcess(launch)
        return process

    def _status(self, job_id: str, attempt: int) -> RunStatus | None:
        report = self._statuses.get(job_id)
        return report.status if report is not None and report.attempt == attempt else None

    def device_use(self, job_id: str, attempt: int) -> dict[str, float]:
        """Use of an attempt's GPUs, for trackers: memory of the fullest, mean utilization; empty without GPUs."""
        status = self._status(job_id, attempt)
        devices = [rank.device for rank in status.ranks if rank.device is not None] if status is not None else []
        if not devices:
            return {}
        use = {"system/gpu_memory_bytes": float(max(device.memory_bytes for device in devices))}
        utilizations = [device.utilization for device in devices if device.utilization is not None]
        return use | ({"system/gpu_utilization": fmean(utilizations)} if utilizations else {})

    def is_evaluating(self, job_id: str, attempt: int) -> bool:
        """Whether a rank of the attempt evaluates, by the last fresh status of its driver. Ranks that wait for it are
        in a collective."""
        report = self._statuses.get(job_id)
        if report is None or report.attempt != attempt or time.time() - report.received_at > FRESH_S:
            return False
        return any(rank.phase == EVALUATION for rank in report.status.ranks)

    def view(self, job_id: str, attempt: int) -> dict[str, Any] | None:
        """Status of an attempt for clients, with current ages; None if unknown."""
        report = self._statuses.get(job_id)
        if report is None or report.attempt != attempt:
            return None
        heard_at = self._driver_heard_at.get(job_id, (attempt, report.received_at))[1]
        fields = report.status.model_dump(mode="json", exclude={"created_at"})
        age_s = max(0.0, time.time() - report.received_at)
        for rank in fields["ranks"]:
            rank["silent_s"] = round(rank["silent_s"] + age_s, 1)
        return {"silent_s": round(max(0.0, time.time() - heard_at), 1), **fields}
