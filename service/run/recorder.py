"""Records and log lines of a process, on the node's disk when a call returns."""

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from pydantic_core import to_json

from moe.records import CheckpointRecord, StepRecord
from moe.train.control import Control, Request
from moe.train.recorder import FinishActivity, Level, Recorder
from service.run.memory import memory_in_use
from service.run.outbox import Outbox
from service.run.sealer import REMOTE_SEAL_INTERVAL_S, SEAL_INTERVAL_S, Sealer, SealTask
from service.run.sender import Sender
from service.run.spool import Seals, Spool, remove_sent_segments, writer_folders
from service.wire.events import RECORD_VERSION, RecordKind, rfc3339
from service.wire.node_folder import spool_folder
from service.wire.run_status import RunStatus

CLOSE_PATIENCE_S = 10.0
"""Longest wait at the end for storage and a slow control plane."""
MAX_REASON = 1000
"""Most characters of a job's reason; the log has all."""


class SpoolRecorder(Recorder):
    """Recorder that spools everything on disk and delivers it in the background. Every process writes log lines;
    rank 0 of each worker group, and the driver, also `speak`: they have a sequence of records."""

    def __init__(
        self,
        *,
        job_id: str,
        attempt: int,
        storage: str,
        events_url: str,
        token: str,
        name: str,
        speaks: bool,
        sweeps: bool,
        max_log_bytes: int | None = None,
    ) -> None:
        """`name`: `driver`, or `g3.rank-0`. `sweeps`: also delivers this node's remains of dead processes.
        `max_log_bytes`: limit of this log on storage."""
        group = name.partition(".")[0]
        self._folder = spool_folder(job_id)
        top = self._folder.parents[1]
        log_writer, metric_writer = f"a{attempt}.{name}", f"a{attempt}.{group}"
        self._lines = Spool(self._folder / "logs" / log_writer, "log", top)
        seals = Seals(storage, "logs", log_writer, max_log_bytes)
        sealed_folders = [SealTask(self._lines.folder, seals, self._lines)]
        self._records: Spool | None = None
        self._sender: Sender | None = None
        outboxes: list[Outbox] = []
        for kind in ("logs", "metrics") if sweeps else ():
            for folder in _unsent_outboxes(self._folder, kind, log_writer):
                outbox = None
                old_attempt, _, old_group = folder.name.partition(".")
                if kind == "metrics" and speaks and old_attempt == f"a{attempt}":
                    outbox = Outbox(folder, f"group-{old_group.removeprefix('g')}")
                    outboxes.append(outbox)
                sealed_folders.append(SealTask(folder, Seals(storage, kind, folder.name), None, outbox))
        if speaks:
            self._records = Spool(self._folder / "metrics" / metric_writer, "jsonl", top)
            writer = "driver" if group == "driver" else f"group-{group.removeprefix('g')}"
            record_outbox = Outbox(self._records, writer)
            outboxes.append(record_outbox)
            sealed_folders.append(SealTask(self._records.folder, Seals(storage, "metrics", metric_writer),
                                 self._records, record_outbox))  # fmt: skip
            self._sender = Sender(events_url, job_id, attempt, token, outboxes)
            self._sender.start()
        remote = "://" in storage and not storage.startswith("file://")
        self._sealer = Sealer(sealed_folders, REMOTE_SEAL_INTERVAL_S if remote else SEAL_INTERVAL_S)
        self._sealer.start()
        self._storage, self._is_last = storage, group == "driver"
        self._is_closed = False
        self.of_group: dict[str, int] = {}
        """Worker group that records are about: `group` and `num_workers`."""

    def record(self, kind: RecordKind, data: dict[str, Any]) -> None:
        """Spool a record, if this process `speaks`; NaN and infinity become null."""
        if self._records is None or self._is_closed:
            return
        time_text = rfc3339(datetime.now(UTC))

        def render(seq: int) -> bytes:
            line = {"version": RECORD_VERSION, "seq": seq, "kind": kind, "time": time_text, "data": data}
            return to_json(line, inf_nan_mode="null") + b"\n"

        self._keep(self._records, render)

    def line(self, level: str, message: str) -> None:
        """Spool lines of text, each with the time and level."""
        if self._is_closed:
            return
        head = f"{rfc3339(datetime.now(UTC))} {level:<7} "
        text = "".join(f"{head}{part}\n" for part in message.splitlines() or [""])
        data = text.encode(errors="replace")
        self._keep(self._lines, lambda _seq: data)

    def _keep(self, spool: Spool, render: Callable[[int], bytes]) -> None:
        try:
            spool.append(render)
        except OSError as error:
            # A full disk loses records but must not end the run. Reported on the console only.
            print(f"lost a record: {error}", file=sys.__stderr__)

    def metric(self, record: StepRecord) -> None:
        self.record("metric", replace(record, memory_bytes=memory_in_use()).to_plain())

    def record_resume(self, step: int, checkpoint: str | None) -> None:
        self.record("resumed", {"step": step, "checkpoint": checkpoint, **self.of_group})

    def record_finish(self, step: int, activity: FinishActivity) -> None:
        self.record("finishing", {"step": step, "activity": activity})
        self.line("info", f"finished {step} steps; {activity}")

    def checkpoint(self, record: CheckpointRecord) -> None:
        self.record("checkpoint", record.to_plain())
        self.line("info", f"checkpoint of step {record.step} committed")

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self.record("checkpoint_failed", {"step": step, "reason": reason[:MAX_REASON]})
        self.line("error", f"the checkpoint of step {step} failed: {reason}")

    def log(self, level: Level, message: str, **fields: Any) -> None:
        self.record("log", {"level": level, "message": message, **fields})
        self.line(level, message + "".join(f" {name}={value}" for name, value in fields.items()))

    def phase(self, name: str, seconds: float) -> None:
        """Record the duration of a part of the start."""
        self.record("phase", {"name": name, "seconds": round(seconds, 3)})

    @property
    def control(self) -> Control:
        """Requests to the run; none in a process that does not speak."""
        return _SenderControl(self._sender)

    def report_status(self, status: Callable[[], RunStatus | None]) -> None:
        """Report the attempt's status to the control plane every few seconds."""
        if self._sender is not None:
            self._sender.run_status = status

    def report_driver_silence(self, silent_s: Callable[[], float]) -> None:
        """Report how long ago the driver last answered this process."""
        if self._sender is not None:
            self._sender.driver_silent_s = silent_s

    def close(self, patience_s: float = CLOSE_PATIENCE_S, after_workers: bool = False) -> None:
        """Deliver the rest, within about `patience_s`. `after_workers`: also that of dead workers, since no group
        follows."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lines.roll()
        if self._records is not None:
            self._records.roll()
        if self._sender is not None:
            self._sender.close(patience_s)
        worker_tasks = list(_worker_tasks(self._folder, self._storage)) if after_workers else []
        self._sealer.close(patience_s, worker_tasks)
        # The driver ends last; the control plane reads from storage what it missed.
        remove_sent_segments(self._folder, keep_sealed=not self._is_last)


class _SenderControl(Control):
    def __init__(self, sender: Sender | None) -> None:
        self._sender = sender

    def poll(self) -> Request | None:
        return self._sender.request if self._sender is not None else None


class CapturedOutput:
    """Context manager that also records a process's `logging` and printed output."""

    def __init__(self, recorder: SpoolRecorder) -> None:
        self._recorder = recorder
        self._handler = _Handler(recorder)
        self._streams: tuple[Any, Any] = (sys.stdout, sys.stderr)
        self._set_aside: list[logging.Handler] = []
        self._console = logging.StreamHandler()

    def __enter__(self) -> "CapturedOutput":
        root = logging.getLogger()
        self._streams = (sys.stdout, sys.stderr)
        # Handlers that look up sys.stderr would record a line twice; this one keeps the original stream.
        self._console = logging.StreamHandler(sys.stderr)
        self._set_aside = [handler for handler in root.handlers if _is_console(handler)]
        for handler in self._set_aside:
            root.removeHandler(handler)
        root.addHandler(self._console)
        root.addHandler(self._handler)
        if root.level > logging.INFO or root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
        sys.stdout = _Tee(sys.stdout, self._recorder, "out")
        sys.stderr = _Tee(sys.stderr, self._recorder, "err")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for tee in (sys.stdout, sys.stderr):
            if isinstance(tee, _Tee):
                tee.record_partial_line()
        sys.stdout, sys.stderr = self._streams
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.removeHandler(self._console)
        for handler in self._set_aside:
            root.addHandler(handler)
        if isinstance(error, Exception):
            self._recorder.line("error", "".join(traceback.format_exception(error)))


def _is_console(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)


class _Handler(logging.Handler):
    def __init__(self, recorder: SpoolRecorder) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._recorder.line(record.levelname.lower(), f"{record.name}: {self.format(record)}")
        except Exception:
            self.handleError(record)


class _Tee:
    """Text stream that passes everything on and records whole lines."""

    def __init__(self, stream: TextIO, recorder: SpoolRecorder, level: str) -> None:
        self._stream, self._recorder, self._level = stream, recorder, level
        self._partial_line = threading.local()

    def write(self, text: str) -> int:
        num_chars = self._stream.write(text)
        *lines, self._partial_line.text = (getattr(self._partial_line, "text", "") + text).split("\n")
        for line in lines:
            self._record(line)
        return num_chars

    def record_partial_line(self) -> None:
        """Record the calling thread's last line, if it has no end."""
        line, self._partial_line.text = getattr(self._partial_line, "text", ""), ""
        self._record(line)

    def _record(self, line: str) -> None:
        # A progress bar rewrites its line; only the final text is recorded.
        if final_text := line.rpartition("\r")[2].rstrip():
            self._recorder.line(self._level, final_text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _unsent_outboxes(job_folder: Path, kind: str, writer_name: str) -> Iterator[Path]:
    """Spools that dead processes of the job left on this node, by attempt and worker group: drivers' for a driver,
    workers' for a worker."""
    own_position = _attempt_and_group(writer_name)
    folders = [
        (position, folder)
        for folder in writer_folders(job_folder, kind)
        if (position := _attempt_and_group(folder.name)) < own_position and (position[1] < 0) == (own_position[1] < 0)
    ]
    yield from (folder for _, folder in sorted(folders))


def _worker_tasks(job_folder: Path, storage: str) -> Iterator[SealTask]:
    for kind in ("logs", "metrics"):
        for folder in writer_folders(job_folder, kind):
            if _attempt_and_group(folder.name)[1] >= 0:
                yield SealTask(folder, Seals(storage, kind, folder.name))


def _attempt_and_group(writer: str) -> tuple[int, int]:
    """Attempt and worker group of a writer; group -1 for the driver."""
    attempt, process, *_ = writer.split(".")
    group = process.removeprefix("g")
    return int(attempt.removeprefix("a")), int(group) if group.isdigit() else -1
