"""`/v1/jobs`: post, list, get, cancel, pause, resume, move and delete jobs; their JSON views and cursors."""

import base64
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import JSONResponse

from moe.spec import json_schema
from moe.spec.errors import Problem
from service.control.api.body import SpecBody
from service.control.api.openapi import refusals
from service.control.api.services import Job, JobId, ServicesDependency
from service.control.errors import Conflict, Gone, Invalid, NotFound
from service.control.jobs.stored_jobs import absence
from service.control.report.event_text import time_text
from service.control.report.history import measured_step, metric_history, metric_page
from service.control.report.saves import read_saves
from service.control.scheduling.requests import QueueEnd
from service.control.store.deletions import DeletionRow
from service.control.store.job_lists import JobFilter, JobSort, Mark, count_states, list_jobs
from service.control.store.jobs import JobRow, JobSummary
from service.control.store.jobs import get_job as read_job
from service.control.store.sweeps import MemberRow, membership_of
from service.control.store.tracked_runs import tracked_runs_of
from service.wire.states import State

router = APIRouter(prefix="/v1", tags=["jobs"])
_MAX_CURSOR_CHARS = 400
_SPEC_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}


_POSTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The job created earlier with this `Idempotency-Key`", "model": dict[str, Any]}
}


@router.post("/jobs", status_code=201, openapi_extra=_SPEC_BODY, responses={**_POSTED, **refusals(Conflict)})
def post_job(
    body: SpecBody,
    services: ServicesDependency,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> dict[str, Any]:
    """Submits a job; 201 means durable. Repeated with the same `Idempotency-Key`, returns 200 and the same job."""
    job, is_new = services.requests.post(body, services.settings.owner, idempotency_key)
    response.headers["location"] = f"/v1/jobs/{job.id}"
    if not is_new:
        response.status_code = 200
    return job_view(job)


@router.get("/jobs")
def get_jobs(
    services: ServicesDependency,
    state: Annotated[Sequence[str], Query(description="one or more states")] = (),
    label: Annotated[
        Sequence[str], Query(max_length=32, description="`key=value`, or `key` for any value; all must match")
    ] = (),
    name: str | None = None,
    owner: str | None = None,
    search: Annotated[str, Query(max_length=200, description="text in the name or id, in any case")] = "",
    sort: Annotated[
        JobSort, Query(description="order; `-` reverses it, and jobs without a value are last: a job without a loss")
    ] = JobSort.NEWEST,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    cursor: str | None = None,
    count: Annotated[
        bool, Query(description="count the jobs on all pages, as `total`, and those in each state, as `states`")
    ] = False,
) -> JSONResponse:
    """Jobs, newest first by default. New jobs do not shift the pages."""
    job_filter = JobFilter(states=_states(state), labels=_labels(label), name=name, owner=owner, search=search)
    after = read_mark(cursor, sort) if cursor else None
    with services.database.read_many() as tx:
        jobs, end = list_jobs(tx, job_filter, sort, after=after, limit=limit)
        states = count_states(tx, job_filter) if count else {}
    counts = {
        "total": sum(number for name, number in states.items() if not job_filter.states or name in job_filter.states),
        "states": states,
    }
    # The most frequent response bypasses FastAPI's encoding, which uses another thread.
    return JSONResponse(
        {
            "items": [summary_view(job) for job in jobs],
            "next_cursor": write_mark(end, sort) if end else None,
            **(counts if count else {}),
        }
    )


@router.get("/jobs/{job_id}", responses=refusals(NotFound, Gone))
def get_job(job_id: JobId, services: ServicesDependency) -> dict[str, Any]:
    """A job without its records; for one being deleted, also why it still exists. `run`: last status of each rank of
    a running attempt, with GPU use and age. `tracking`: each experiment tracker, with the place of its run there, and
    what keeps it from being written. `sweep`: the sweep that it is a member of, with its values."""
    with services.database.read() as tx:
        job = read_job(tx, job_id)
        if job is None:
            raise absence(tx, job_id)
        tracked_runs = tracked_runs_of(tx, job.number)
        membership = membership_of(tx, job.id)
    run = services.ingest.statuses.view(job.id, job.attempt) if job.launch is not None else None
    tracking = [{"tracker": row.tracker, "place": row.place, "trouble": row.trouble} for row in tracked_runs]
    return job_view(job) | {"run": run, "tracking": tracking, "sweep": _sweep_view(membership)}


@router.delete(
    "/jobs/{job_id}",
    status_code=202,
    responses={200: {"description": "The job is deleted completely"}, **refusals(NotFound, Conflict)},
)
def delete_job(job_id: JobId, services: ServicesDependency, response: Response) -> dict[str, Any]:
    """Deletes a job that has ended or is paused, with its storage, events and metrics. 202: will be deleted, even
    after a crash; repeated, 200 once all is gone. Later requests for the job get 410."""
    deletion, reason = services.deletions.ask(job_id, services.settings.owner)
    if deletion.finished_at is not None:
        response.status_code = 200
    return deletion_view(deletion, reason)


@router.post("/jobs/{job_id}/cancel", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def cancel_job(job_id: JobId, services: ServicesDependency) -> dict[str, Any]:
    """Requests a job's end, at a step boundary or by force after a deadline."""
    return job_view(services.requests.cancel(job_id, services.settings.owner))


@router.post("/jobs/{job_id}/pause", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def pause_job(job_id: JobId, services: ServicesDependency) -> dict[str, Any]:
    """Requests a checkpoint at a step boundary and the release of the job's workers."""
    return job_view(services.requests.pause(job_id, services.settings.owner))


@router.post("/jobs/{job_id}/resume", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def resume_job(job_id: JobId, services: ServicesDependency) -> dict[str, Any]:
    """Queues a paused, failed or cancelled job again, to continue from its last committed checkpoint; a failed or
    cancelled one without a checkpoint is refused."""
    return job_view(services.requests.resume(job_id, services.settings.owner))


@router.post("/jobs/{job_id}/move", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def move_job(
    job_id: JobId, services: ServicesDependency, to: Annotated[QueueEnd, Query(description="front or end of the queue")]
) -> dict[str, Any]:
    """Moves a queued job to the front or end of the queue."""
    return job_view(services.requests.move(job_id, services.settings.owner, to))


@router.get("/jobs/{job_id}/plan", responses=refusals(NotFound, Gone))
def get_plan(job: Job, services: ServicesDependency) -> dict[str, Any]:
    """Layout of the job; once it runs, measured values beside predicted ones."""
    if job.plan is None:
        raise NotFound(f"{job.id} has no plan yet: {job.reason}")
    plan: dict[str, Any] = json.loads(job.plan)
    if (tokens_per_step := plan.get("tokens_per_step")) is None:  # of another release
        return plan
    measurement = measured_step(services.database, job.number, job.attempt, tokens_per_step)
    return {**plan, "measured": measurement}


@router.get("/jobs/{job_id}/metrics", responses=refusals(NotFound, Gone))
def get_metrics(
    job: Job,
    services: ServicesDependency,
    name: Annotated[str | None, Query(min_length=1, max_length=100)] = None,
    since_step: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    max_points: Annotated[int | None, Query(ge=1, le=10_000, description="default: 1000")] = None,
    limit: Annotated[
        int | None, Query(ge=1, le=10_000, description="return every step instead, with this page size")
    ] = None,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Recorded values of each step, the newest of repeated steps: thinned to `max_points`, or with `limit` all, in
    pages. Thinned evenly; a number of one `name` with the extremes of each stretch, and what is not finite (null)."""
    if limit is None and cursor is None:
        points = metric_history(services.database, services.curves, job.number, name, since_step, max_points or 1000)
        return {"items": points, "next_cursor": None}
    if max_points is not None:
        rule = "selects fewer steps; limit and cursor page through all of them"
        problem = Problem("conflict", "query.max_points", max_points, rule, "omit it, or omit limit and cursor")
        raise Invalid(str(problem), problem)
    begin = max(since_step, read_cursor(cursor) if cursor else 0)
    points, next_step = metric_page(services.database, job.number, name, begin, limit or 1000)
    return {"items": points, "next_cursor": None if next_step is None else write_cursor(next_step)}


@router.get("/schema")
def get_schema(
    sweep: Annotated[bool, Query(description="of a job with `sweep`, as `POST /v1/sweeps` takes it")] = False,
) -> dict[str, Any]:
    """JSON Schema of a job spec, for editors."""
    return json_schema(with_sweep=sweep)


def _states(entries: Sequence[str]) -> list[str]:
    states = [state for entry in entries for state in entry.split(",") if state]
    for state in states:
        if state not in set(State):
            problem = Problem(
                "not_a_choice", "query.state", state, "is not a job state", f"use one of {', '.join(State)}"
            )
            raise Invalid(str(problem), problem)
    return states


def _labels(entries: Sequence[str]) -> list[tuple[str, str | None]]:
    labels = []
    for entry in entries:
        key, equals, value = entry.partition("=")
        labels.append((key, value if equals else None))
    return labels


def write_cursor(number: int) -> str:
    """For jobs, the last one's number; for metrics, the next page's first step. Opaque to clients."""
    return base64.urlsafe_b64encode(f"n{number}".encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> int:
    """Number in a cursor. Raises Invalid for one that this service did not write."""
    try:
        text = _decoded(cursor)
    except ValueError:
        text = ""
    if not (text.startswith("n") and text[1:].isdecimal() and len(text) < 20):
        raise _unknown_cursor(cursor)
    return int(text[1:])


def write_mark(mark: Mark, sort: JobSort) -> str:
    """Cursor of a list of jobs, which only continues in the same order."""
    if sort in (JobSort.NEWEST, JobSort.OLDEST):
        return write_cursor(mark.number)
    text = json.dumps([sort.value, mark.number, mark.value])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_mark(cursor: str, sort: JobSort) -> Mark:
    """Mark in a cursor. Raises Invalid for one that this service did not write, or wrote for another order."""
    if sort in (JobSort.NEWEST, JobSort.OLDEST):
        return Mark(read_cursor(cursor))
    try:
        order, number, value = json.loads(_decoded(cursor))
    except (ValueError, TypeError):
        raise _unknown_cursor(cursor) from None
    is_text = sort.value.removeprefix("-") in ("name", "state")
    is_value = isinstance(value, str) and "\0" not in value if is_text else _is_float(value)
    is_number = type(number) is int and 0 <= number < 2**63
    if order != sort.value or not is_number or not is_value:
        raise _unknown_cursor(cursor)
    return Mark(number, value)


def _is_float(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value))


def _decoded(cursor: str) -> str:
    """Raises ValueError for text that is no cursor."""
    if len(cursor) > _MAX_CURSOR_CHARS:
        raise ValueError("is too long")  # and might nest deeper than Python reads
    return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")


def _unknown_cursor(cursor: str) -> Invalid:
    problem = Problem(
        "invalid_value", "query.cursor", cursor, "is not a cursor of this service", "use the next_cursor of a page"
    )
    return Invalid(str(problem), problem)


def summary_view(job: JobSummary) -> dict[str, Any]:
    """A job in a list."""
    return {
        "id": job.id,
        "name": job.name,
        "owner": job.owner,
        "labels": json.loads(job.labels),
        "state": job.state,
        "reason": job.reason,
        "request": job.request,
        "attempt": job.attempt,
        "created_at": time_text(job.created_at),
        "updated_at": time_text(job.updated_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.finished_at),
        "step": job.step,
        "num_steps": job.num_steps,
        "loss": job.loss,
        "last_event_id": job.last_event_id,
        "first_event_id": job.first_event_id,
        "dashboard_url": job.dashboard_url,
        "storage": job.storage,
    }


def job_view(job: JobRow) -> dict[str, Any]:
    """All of a job; its spec as stored, by any release."""
    return {
        **summary_view(job),
        "failures": job.failures,
        "last_metric": _json(job.last_metric),
        **read_saves(job.saves).view(),
        "result": _json(job.result),
        "spec": _json(job.spec),
    }


def deletion_view(deletion: DeletionRow, reason: str) -> dict[str, Any]:
    """A job that is being deleted, or gone."""
    return {
        "id": deletion.job_id,
        "name": deletion.name,
        "owner": deletion.owner,
        "state": "deleting" if deletion.finished_at is None else "deleted",
        "reason": reason,
        "actor": deletion.actor,
        "requested_at": time_text(deletion.requested_at),
        "finished_at": _time(deletion.finished_at),
    }


def _sweep_view(membership: tuple[str, MemberRow] | None) -> dict[str, Any] | None:
    if membership is None:
        return None
    sweep_id, member = membership
    return {"id": sweep_id, "member": member.number, "values": json.loads(member.field_values), "rung": member.rung}


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else time_text(time_us)


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
