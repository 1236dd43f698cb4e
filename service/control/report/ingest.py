"""Ingests the records of runs: once and in order, from the newest attempt and worker group only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from sqlalchemy import Connection

from service.control.errors import Conflict, Forbidden, NotFound
from service.control.report.curve_store import CHUNK_EVENTS, pack_chunks
from service.control.report.event_text import data_text, to_wire
from service.control.report.failure_history import FailureHistory, read_failures
from service.control.report.hub import Hub
from service.control.report.outbox import enqueue_checkpoints
from service.control.report.plans import change_of, recorded_plan
from service.control.report.run_status import RunStatuses
from service.control.report.saves import read_saves
from service.control.report.tokens import TokenMint, hash_token, matches
from service.control.store import writers
from service.control.store.clock import now_us, to_us
from service.control.store.database import Database
from service.control.store.deletions import find_deletion
from service.control.store.events import EventRow, NewEvent, append_events, furthest_step, redone_steps
from service.control.store.jobs import JobRow, get_job, set_columns
from service.wire.events import Record, RecordAnswer, RecordBatch

_PHASES = {
    "started": "running", "resumed": "running", "finishing": "running", "waiting": "waiting",
    "recovering": "recovering",
}  # fmt: skip
"""Phase of a worker group after a record of each kind."""
MAX_KIND = 32
_FINISH_ACTIVITIES = {"saving": "saving the last checkpoint", "evaluating": "evaluating the finished model"}
_LEVELS = {"waiting": "warning", "recovering": "warning", "checkpoint_failed": "error"}
"""Levels of records that become log lines; `info` for all others."""


class Ingest:
    """Stores records; nothing else does."""

    def __init__(self, database: Database, hub: Hub, mint: TokenMint, on_phase: Callable[[], None]) -> None:
        self._database, self._hub, self._mint = database, hub, mint
        self._on_phase = on_phase
        """Called when a worker group started or died, to wake the controller."""
        self.statuses = RunStatuses()

    def admit(self, job_id: str, token: str) -> None:
        """Check that `token` is of the job's newest attempt. Raises NotFound and Forbidden (stop sending), which also
        tells a run that was considered lost to end."""
        with self._database.read() as tx:
            job = get_job(tx, job_id)
            has_ended = job is None or job.launch is None
            deletion = find_deletion(tx, job_id=job_id) if has_ended else None
        if deletion is not None:
            self._refuse(f"{job_id} was deleted; its records are refused", token, job_id, deletion.attempts)
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        if not matches(token, job.token_hash):
            reason = f"records of {job_id} need the token of its newest attempt"
            self._refuse(reason, token, job_id, job.attempt - 1)

    def _refuse(self, reason: str, token: str, job_id: str, attempts: int) -> NoReturn:
        """Raises Forbidden; tells runs of the first `attempts` attempts to end."""
        token_hashes = (hash_token(self._mint.token(job_id, attempt)) for attempt in range(1, attempts + 1))
        is_run = any(matches(token, token_hash) for token_hash in token_hashes)
        raise Forbidden(reason, members={"request": "cancel"} if is_run else None)

    def take(self, job_id: str, token: str, batch: RecordBatch) -> RecordAnswer:
        """Store a batch. Raises NotFound, Forbidden (stop sending), Conflict with `next_seq` at a gap."""
        if not batch.records:
            with self._database.read() as tx:
                job = self._authorize(tx, job_id, token, batch)
                self.statuses.record_batch(job_id, batch)
                next_seq = writers.next_seq(tx, job.number, batch.attempt, batch.writer)
            if job.launch is None:
                return _end_request(batch)
            _refuse_gap(batch, next_seq, job)
            return RecordAnswer(next_seq=next_seq, request=_request(job))
        with self._database.write() as tx:
            job = self._authorize(tx, job_id, token, batch)
            self.statuses.record_batch(job_id, batch)
            if job.launch is None:
                return _end_request(batch)
            next_seq = writers.next_seq(tx, job.number, batch.attempt, batch.writer)
            _refuse_gap(batch, next_seq, job)
            new_records = batch.records[next_seq - batch.first_seq :]
            event_rows = self._store(tx, job, batch.attempt, batch.writer, next_seq, new_records)
            enqueue_checkpoints(tx, job, event_rows)
        self._publish(job, new_records, event_rows)
        return RecordAnswer(next_seq=next_seq + len(new_records), request=_request(job))

    def next_seq(self, job_id: str, attempt: int, writer: str) -> int:
        """Sequence number of the writer's next record; all below are stored."""
        with self._database.read() as tx:
            job = get_job(tx, job_id)
            return 0 if job is None else writers.next_seq(tx, job.number, attempt, writer)

    def take_over(self, job_id: str, attempt: int, writer: str, first_seq: int, records: Sequence[Record]) -> int:
        """Store a writer's records from storage; returns the number of new ones. Called once the attempt's processes
        are gone."""
        with self._database.write() as tx:
            job = get_job(tx, job_id, lock=True)
            if job is None or job.attempt < attempt or job.launch is None:
                return 0
            next_seq = writers.next_seq(tx, job.number, attempt, writer)
            if first_seq > next_seq:
                return 0  # a gap, which later records would hide
            new_records = records[next_seq - first_seq :]
            event_rows = self._store(tx, job, attempt, writer, next_seq, new_records)
            enqueue_checkpoints(tx, job, event_rows)
        self._publish(job, new_records, event_rows)
        return len(new_records)

    def restore(self, tx: Connection, job: JobRow, attempt: int, writer: str, records: Sequence[Record]) -> None:
        """Store records during recovery, as if `attempt` were the newest."""
        next_seq = writers.next_seq(tx, job.number, attempt, writer)
        self._store(tx, replace(job, attempt=attempt), attempt, writer, next_seq, records)

    def _authorize(self, tx: Connection, job_id: str, token: str, batch: RecordBatch) -> JobRow:
        job = get_job(tx, job_id, lock=bool(batch.records))
        if job is None:
            raise NotFound(f"there is no job {job_id}")
        if batch.attempt != job.attempt or not matches(token, job.token_hash):
            raise Forbidden(
                f"records of attempt {batch.attempt} of {job_id} require the token of the newest "
                "attempt and must come from it"
            )
        if self._is_superseded(tx, job, batch.attempt, batch.writer):
            raise Forbidden(f"{batch.writer} was replaced by a newer worker group; its records are refused")
        return job

    def _store(
        self, tx: Connection, job: JobRow, attempt: int, writer: str, next_seq: int, new_records: Sequence[Record]
    ) -> list[EventRow]:
        if not new_records:
            return []
        losses = _losses(tx, job, attempt, new_records)  # computed before the records are stored
        is_late = self._is_superseded(tx, job, attempt, writer)
        events = [_event(record, attempt, writer) for record in new_records]
        event_rows = append_events(tx, job.number, _mark_superseded(tx, job, events) if is_late else events)
        writers.advance(tx, job.number, attempt, writer, _group(writer), next_seq + len(new_records))
        columns: dict[str, Any] = {"updated_at": now_us()}
        if losses != read_failures(job.losses, job.failures):
            columns |= {"losses": losses.model_dump_json(), "failures": losses.num_failures}
        if attempt == job.attempt and not is_late:
            columns |= _changed_columns(job, new_records)
        set_columns(tx, job.number, columns)
        return event_rows

    def _is_superseded(self, tx: Connection, job: JobRow, attempt: int, writer: str) -> bool:
        """Whether a newer attempt or worker group has begun."""
        group, newest = _group(writer), writers.newest_group(tx, job.number)
        return attempt < newest[0] if group is None else (attempt, group) < newest

    def _publish(self, job: JobRow, new_records: Sequence[Record], event_rows: Sequence[EventRow]) -> None:
        self._hub.publish(job.id, [to_wire(row) for row in event_rows])
        if any(record.kind in _PHASES for record in new_records):
            self._on_phase()
        if event_rows and event_rows[-1].id // CHUNK_EVENTS > (event_rows[0].id - 1) // CHUNK_EVENTS:
            pack_chunks(self._database, job.number)


def _end_request(batch: RecordBatch) -> RecordAnswer:
    """Answer that tells a superseded run to leave the cluster; its records are not stored."""
    return RecordAnswer(next_seq=batch.first_seq + len(batch.records), request="cancel")


def _refuse_gap(batch: RecordBatch, next_seq: int, job: JobRow) -> None:
    if batch.first_seq > next_seq:
        raise Conflict(
            f"{batch.writer} of {job.id} sent record {batch.first_seq}; send from {next_seq} on",
            members={"next_seq": next_seq, "request": _request(job)},
        )


def _request(job: JobRow) -> Any:
    """Request as sent to the run: it resizes by pausing."""
    return "pause" if job.request == "resize" else job.request


def _group(writer: str) -> int | None:
    return None if writer == "driver" else int(writer.removeprefix("group-"))


def _changed_columns(job: JobRow, records: Sequence[Record]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    newest_phase = job.group_phase_at or 0
    saves = read_saves(job.saves)
    for record in records:
        time = to_us(record.time)
        if record.kind == "metric":
            # Loads by label may have a megabyte, which lists of jobs would carry.
            columns["last_metric"] = data_text(
                {key: value for key, value in record.data.items() if key != "label_loads"}
            )
            columns["loss"] = _loss(record)
            if (step := _step(record)) is not None:
                columns["step"] = step
        if record.kind in ("checkpoint", "checkpoint_failed") and (step := _valid_step(record)) is not None:
            saves = saves.after(record, step)
            columns["saves"] = saves.model_dump_json()
        if record.kind == "plan" and (plan := recorded_plan(record.data)) is not None:
            columns["plan"] = plan.model_dump_json()
        if record.kind in _PHASES and time >= newest_phase:
            newest_phase = time
            columns["group_phase"] = _PHASES[record.kind]
            columns["group_phase_at"] = time
            columns["group_reason"] = _message(record)
    return columns


def _losses(tx: Connection, job: JobRow, attempt: int, records: Sequence[Record]) -> FailureHistory:
    """The failure history with these records: failures, and progress by checkpoints beyond any earlier step."""
    losses = read_failures(job.losses, job.failures)
    furthest = None
    for record in records:
        moment = (attempt, to_us(record.time))
        is_counted = not any(record.data.get(name) is True for name in ("preempted", "at_start"))
        if record.kind == "recovering" and is_counted:
            losses = losses.after_failure(moment, str(record.data.get("kind") or "")[:MAX_KIND])
        if record.kind == "checkpoint":
            furthest = furthest_step(tx, job.number, "checkpoint") if furthest is None else furthest
            step = _step(record) or 0
            if step > furthest:
                furthest, losses = step, losses.after_progress(moment)
    return losses


def _mark_superseded(tx: Connection, job: JobRow, events: Sequence[NewEvent]) -> list[NewEvent]:
    steps = {event.step for event in events if event.kind == "metric" and event.step is not None}
    redone = redone_steps(tx, job.number, "metric", steps, events[0].attempt or 0, events[0].group or 0)
    return [
        replace(event, superseded="step" if event.step in redone else "run") if event.kind == "metric" else event
        for event in events
    ]


def _event(record: Record, attempt: int, writer: str) -> NewEvent:
    data, kind = record.data, str(record.kind)
    if record.kind in _PHASES or record.kind in ("phase", "checkpoint_failed"):
        kind = "log"
        level = _LEVELS.get(record.kind, "info")
        data = {"level": level, "message": _message(record), "record": record.kind, **data}
    if record.kind == "plan":
        plan = recorded_plan(data)
        if plan is None:
            kind, data = "log", {"level": "warning", "message": "recorded an unreadable plan"}
        else:
            data = change_of(plan, None)
    return NewEvent(kind, to_us(record.time), attempt, writer, data_text(data), _step(record), _group(writer))


def _step(record: Record) -> int | None:
    return _valid_step(record) if record.kind in ("metric", "checkpoint") else None


def _loss(record: Record) -> float | None:
    """The record's loss, if finite."""
    loss = record.data.get("loss")
    if not isinstance(loss, int | float) or isinstance(loss, bool) or not math.isfinite(loss):
        return None
    return float(loss)


def _valid_step(record: Record) -> int | None:
    """The record's step, if valid."""
    step = record.data.get("step")
    in_range = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**31
    return step if in_range else None


def _message(record: Record) -> str:
    data = record.data
    match record.kind:
        case "started":
            workers = data.get("workers")
            return _describe_groups(data, len(workers) if isinstance(workers, list) else 0)
        case "resumed":
            start = f"from step {data.get('step')}" if data.get("step") else "from the start"
            return f"{_describe_groups(data, data.get('num_workers'))}, {start}"
        case "finishing":
            activity = _FINISH_ACTIVITIES.get(str(data.get("activity")), "finishing")
            return f"finished {data.get('step')} steps; {activity}"
        case "waiting":
            return str(data.get("reason", "its workers are waiting for resources"))
        case "recovering":
            return f"the worker group died and is being restarted: {data.get('reason', 'no reason given')}"
        case "checkpoint_failed":
            return f"the checkpoint of step {data.get('step')} failed: {data.get('reason', 'no reason given')}"
        case _:
            return f"{data.get('name', 'a phase')} took {data.get('seconds', '?')} s"


def _describe_groups(data: dict[str, Any], num_workers: Any) -> str:
    workers = f"{num_workers} worker{'' if num_workers == 1 else 's'}" if num_workers else "its workers"
    return f"worker group {data.get('group', 0)} is running on {workers}"
