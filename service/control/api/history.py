"""`/v1/jobs/{id}/history` and `/difference`: a job's events, and the fields in which two specs differ."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Query

from service.control.api.jobs import read_cursor, write_cursor
from service.control.api.openapi import refusals
from service.control.api.services import Job, ServicesDependency
from service.control.errors import Gone, NotFound
from service.control.jobs.stored_jobs import find_job
from service.control.report.event_text import to_wire
from service.control.store.events import events_before
from service.wire.spec_difference import spec_difference

router = APIRouter(prefix="/v1", tags=["jobs"])


class EventKind(StrEnum):
    STATE = "state"
    PLAN = "plan"
    METRIC = "metric"
    CHECKPOINT = "checkpoint"
    LOG = "log"


@router.get("/jobs/{job_id}/history", responses=refusals(NotFound, Gone))
def get_history(
    job: Job,
    services: ServicesDependency,
    kind: Annotated[Sequence[EventKind], Query(max_length=5, description="default: all but `metric`")] = (),
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=100)] = None,
) -> dict[str, Any]:
    """Kept events, the newest first, as in the event stream."""
    kinds = kind or [kind for kind in EventKind if kind != EventKind.METRIC]
    before = read_cursor(cursor) if cursor else None
    with services.database.read() as tx:
        rows = events_before(tx, job.number, before, limit + 1, kinds)
    page = rows[:limit]
    return {
        "items": [json.loads(to_wire(row).json) for row in page],
        "next_cursor": write_cursor(page[-1].id) if len(rows) > limit else None,
    }


@router.get("/jobs/{job_id}/difference", responses=refusals(NotFound, Gone))
def get_difference(
    job: Job, services: ServicesDependency, other: Annotated[str, Query(max_length=64, description="id of a job")]
) -> dict[str, Any]:
    """Fields in which the specs of this job and of `other` differ, by path: `value` and `other`; null where a spec
    does not have the field."""
    with services.database.read() as tx:
        other_job = find_job(tx, other)
    return {"items": spec_difference(json.loads(job.spec), json.loads(other_job.spec)), "next_cursor": None}
