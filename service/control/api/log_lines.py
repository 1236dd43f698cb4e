"""`/v1/jobs/{id}/logs/lines`: a job's log in pages, from its end backwards."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from moe.spec.errors import Problem
from service.control.api.openapi import refusals
from service.control.api.services import Job, ServicesDependency
from service.control.api.streams import LogLevel, line_view, read_since
from service.control.errors import Gone, Invalid, NotFound, Unavailable
from service.control.report.event_text import time_text
from service.control.report.log_pages import LogKey, LogPager, read_before, write_before
from service.control.report.logs import LEVELS, LogChoice, level_of
from service.wire.segments import SegmentFolder

router = APIRouter(prefix="/v1", tags=["streams"])


@router.get("/jobs/{job_id}/logs/lines", responses=refusals(NotFound, Gone))
def get_log_lines(
    job: Job,
    services: ServicesDependency,
    worker: Annotated[str | None, Query(max_length=64, description="`driver`, `g0.rank-1`; default: all")] = None,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    since: Annotated[int, Depends(read_since)] = 0,
    grep: Annotated[str, Query(max_length=1000, description="only lines that contain this text")] = "",
    level: Annotated[LogLevel | None, Query(description="only lines of this level or a more severe one")] = None,
    limit: Annotated[int, Query(ge=1, le=2000)] = 200,
    cursor: Annotated[str | None, Query(max_length=300)] = None,
) -> dict[str, Any]:
    """Newest log lines of the driver and all workers, newest first, without control characters; `next_cursor`
    continues with older ones. A page reads a bounded part of the log: it may have fewer lines than `limit`, or none,
    and was searched back to `searched_to`. `writers`: all logs of the job."""
    try:
        folder = SegmentFolder(services.storage_roots.folder(job.storage), "logs")
        choice = LogChoice(attempt, worker, since, grep, False, LEVELS[level] if level else 0)
        page = LogPager(folder, choice).page(limit, _before(cursor))
        writers = folder.writers()
    except OSError as error:
        raise Unavailable(f"cannot read the storage of {job.id}: {error}") from None
    return {
        "items": [{**line_view(line), "level": level_of(line.text)} for line in page.lines],
        "next_cursor": None if page.next_before is None else write_before(page.next_before),
        "searched_to": time_text(page.searched_to) if page.searched_to else None,
        "writers": [writer.name for writer in writers],
    }


def _before(cursor: str | None) -> LogKey | None:
    if cursor is None:
        return None
    try:
        return read_before(cursor)
    except ValueError:
        rule = "is not a cursor of this service"
        problem = Problem("invalid_value", "query.cursor", cursor, rule, "use the next_cursor of a page")
        raise Invalid(str(problem), problem) from None
