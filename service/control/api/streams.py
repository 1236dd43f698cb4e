"""Streams that last as long as a job: its events and its log."""

import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from enum import StrEnum
from time import monotonic
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from moe.spec.errors import Problem
from service.control.api.openapi import refusals
from service.control.api.services import Place, Services, ServicesDependency
from service.control.errors import Gone, Invalid, NotFound, Unavailable
from service.control.report.event_text import WireEvent, time_text, without_layers
from service.control.report.hub import Hub, Tail
from service.control.report.logs import LEVELS, LogChoice, LogLine, LogReader
from service.control.store.clock import now_us, to_us
from service.control.store.jobs import JobReference, get_summary
from service.wire.segments import SegmentFolder
from service.wire.since import parse_since
from service.wire.states import OVER

router = APIRouter(prefix="/v1", tags=["streams"])
LOG_POLL_S = 1.0
"""Interval of polling for new segments: storage does not notify."""
_MAX_NAMED = 20


class EventStream(StreamingResponse):
    """Server-sent events. FastAPI's own class takes twice the memory per stream."""

    media_type = "text/event-stream"


async def _last_event_id(
    last_event_id: Annotated[str | None, Header(max_length=32)] = None,
    last_id: Annotated[int | None, Query(ge=0, lt=2**31, alias="last_event_id")] = None,
) -> int:
    """The header, which browsers send on reconnecting, or the query parameter."""
    if not last_event_id:
        return last_id or 0
    if not (last_event_id.isascii() and last_event_id.isdecimal()):
        problem = Problem(
            "invalid_value", "header.last-event-id", last_event_id, "must be an event id", "use an id from this stream"
        )
        raise Invalid(str(problem), problem)
    return min(int(last_event_id), 2**31 - 1)


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


async def read_since(
    since: Annotated[
        str | None, Query(max_length=40, description="only lines since a time, or since `10m` ago")
    ] = None,
) -> int:
    """Microseconds since 1970; 0 for all."""
    if not since:
        return 0
    try:
        start = parse_since(since)
        return max(0, now_us() - start // timedelta(microseconds=1) if isinstance(start, timedelta) else to_us(start))
    except (ValueError, OverflowError) as error:
        problem = Problem("invalid_value", "query.since", since, str(error), "correct it or omit it")
        raise Invalid(str(problem), problem) from None


async def _begin(job: Place, last_id: Annotated[int, Depends(_last_event_id)]) -> int:
    """Id after which the stream begins. Raises Gone if later events are no longer kept."""
    if 0 < last_id < job.first_event_id - 1:
        raise Gone(
            f"events of {job.id} before {job.first_event_id} are no longer kept, but you request "
            f"those after {last_id}; start again without Last-Event-ID; metrics of all steps are at "
            "/metrics"
        )
    return max(last_id, job.first_event_id - 1)


@router.get("/jobs/{job_id}/events", response_class=EventStream, responses=refusals(NotFound, Gone))
async def get_events(
    job: Place,
    last_id: Annotated[int, Depends(_begin)],
    services: ServicesDependency,
    interval_s: Annotated[
        float, Query(ge=0, le=60, description="send new events together, at most this often; 0: at once")
    ] = 0.0,
    loads: Annotated[bool, Query(description="metrics with the expert loads of `layers`")] = True,
) -> EventStream:
    """Server-sent events `state`, `plan`, `metric`, `checkpoint` and `log`, from the first kept one or after
    `Last-Event-ID`; 410 if that precedes the job's `first_event_id`. A late metric of an older attempt has
    `superseded`: `step` if a newer attempt recorded that step, else `run`. Ends after the job."""
    events = _events(services, job, last_id, interval_s, loads)
    return EventStream(events, headers={"x-accel-buffering": "no"})


async def _events(
    services: Services, job: JobReference, last_id: int, interval_s: float, loads: bool
) -> AsyncIterator[bytes]:
    with services.figures.streams.track_inprogress():
        async for events in services.streams.follow(job, last_id, interval_s):
            yield b"".join(_event_text(event, loads) for event in events) or b": ping\n\n"


def _event_text(event: WireEvent, loads: bool) -> bytes:
    data = event.json if loads or event.kind != "metric" else without_layers(event.json)
    return f"event: {event.kind}\ndata: {data}\nid: {event.id}\n\n".encode()


@router.get("/jobs/{job_id}/logs", responses=refusals(NotFound, Gone))
async def get_logs(
    request: Request,
    job: Place,
    services: ServicesDependency,
    worker: Annotated[str | None, Query(max_length=64)] = None,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    tail: Annotated[
        int | None, Query(ge=0, le=10_000, description="only this many lines, the newest, in order of time")
    ] = None,
    since: Annotated[int, Depends(read_since)] = 0,
    grep: Annotated[str, Query(max_length=1000, description="only lines that contain this text")] = "",
    level: Annotated[LogLevel | None, Query(description="only lines of this level or a more severe one")] = None,
    follow: bool = False,
    raw: Annotated[bool, Query(description="lines unchanged, with escape codes")] = False,
) -> StreamingResponse:
    """Log of the driver and all workers, also after they are gone.

    Text, each line prefixed with its writer unless one `worker` (`driver`, `g0.rank-1`) is selected; or, with
    `Accept: application/x-ndjson`, JSON lines of `attempt`, `worker`, `message`, `time` and `position`, which
    increases per worker. `follow` continues until the job has ended; lines arrive when their segment is sealed.
    `tail`, `since`, `grep` and `level` combine: the newest matching lines, at most 8 MB, and with `follow` all new
    ones. Control characters are removed, unless `raw`.
    """
    # In the thread pool: the first use of a storage backend may be slow.
    folder = await run_in_threadpool(lambda: SegmentFolder(services.storage_roots.folder(job.storage), "logs"))
    reader = LogReader(folder, LogChoice(attempt, worker, since, grep, raw, LEVELS[level] if level else 0))
    try:
        writers = await run_in_threadpool(reader.writers)  # before the status is sent
    except OSError as error:
        raise Unavailable(f"cannot read the storage of {job.id}: {error}") from None
    if worker is not None and not follow and not writers:
        names = [writer.name for writer in await run_in_threadpool(reader.folder.writers)]
        writer_names = f"; writers with a log: {', '.join(names[:_MAX_NAMED])}" if names else ""
        raise NotFound(f"{job.id} has no log of {worker!r}{writer_names}{' ...' * (len(names) > _MAX_NAMED)}")
    as_json = "application/x-ndjson" in request.headers.get("accept", "")
    render = _json_line if as_json else _text_line if worker is None else _bare_line
    return StreamingResponse(
        _log(services, job.id, reader, render, tail, follow),
        media_type="application/x-ndjson" if as_json else "text/plain; charset=utf-8",
        headers={"x-accel-buffering": "no"},
    )


async def _log(
    services: Services,
    job_id: str,
    reader: LogReader,
    render: Callable[[LogLine], bytes],
    newest: int | None,
    follow: bool,
) -> AsyncIterator[bytes]:
    with services.hub.follow(job_id) as tail:
        while True:
            looked_at = monotonic()
            # Check before reading: all log lines are sealed by the time a job has ended.
            is_last = not follow or await run_in_threadpool(_has_ended, services, job_id)
            portions = reader.lines() if newest is None else reader.newest(newest)
            newest = None
            while (portion := await run_in_threadpool(next, portions, None)) is not None:
                if portion:
                    yield b"".join(map(render, portion))
            if is_last or services.hub.is_closed:
                break
            await _pause(services.hub, tail, looked_at + LOG_POLL_S)
    yield b"".join(map(render, reader.unterminated_lines()))


async def _pause(hub: Hub, tail: Tail, until: float) -> None:
    """Wait until `until` despite new events, or for the end of this service."""
    while not hub.is_closed and (left_s := until - monotonic()) > 0:
        await tail.news(tail.version, left_s)


def _has_ended(services: Services, job_id: str) -> bool:
    with services.database.read() as tx:
        job = get_summary(tx, job_id)
    return job is None or job.state in OVER


def _text_line(line: LogLine) -> bytes:
    return f"{line.writer.name} | {line.text}\n".encode()


def _bare_line(line: LogLine) -> bytes:
    return f"{line.text}\n".encode()


def _json_line(line: LogLine) -> bytes:
    return (json.dumps(line_view(line)) + "\n").encode()


def line_view(line: LogLine) -> dict[str, Any]:
    """A log line as JSON."""
    return {
        "attempt": line.writer.attempt,
        "worker": line.writer.name.partition(".")[2],
        "message": line.text,
        "time": time_text(line.time) if line.time else None,
        "position": line.position,
    }
