"""`/v1/sweeps`: post, list, get, pause, resume, cancel and delete families of jobs."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Response

from moe.spec.errors import Problem
from service.control.api.body import SpecBody
from service.control.api.jobs import read_cursor, write_cursor
from service.control.api.openapi import refusals
from service.control.api.services import ServicesDependency
from service.control.errors import Conflict, Gone, Invalid, NotFound
from service.control.report.event_text import time_text
from service.control.store.sweeps import (
    DecisionRow,
    MemberRow,
    SweepRow,
    decisions_of,
    list_sweeps,
    members_of,
    states_of_members,
)
from service.control.sweeps.requests import find_sweep
from service.control.sweeps.results import MetricValue, state_of, value_of_member
from service.control.sweeps.states import SweepState

router = APIRouter(prefix="/v1", tags=["sweeps"])
_SWEEP_ID = re.compile(r"sweep-[a-z2-7]{12}")
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}
_POSTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The sweep created earlier with this `Idempotency-Key`", "model": dict[str, Any]}
}


async def _sweep_id(sweep_id: Annotated[str, Path(description="`sweep-` and 12 letters and digits")]) -> str:
    if not _SWEEP_ID.fullmatch(sweep_id):
        raise NotFound("there is no such sweep; an id is 'sweep-' and 12 letters and digits")
    return sweep_id


SweepId = Annotated[str, Depends(_sweep_id)]


@router.post("/sweeps", status_code=201, openapi_extra=_BODY, responses={**_POSTED, **refusals(Conflict)})
def post_sweep(
    body: SpecBody,
    services: ServicesDependency,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> dict[str, Any]:
    """Submits a family of jobs: a job with `sweep`, which says which fields take which values. 201 means that all its
    jobs are durable; if one is invalid, none is stored. Repeated with the same `Idempotency-Key`, returns 200 and the
    same sweep."""
    sweep, is_new = services.sweeps.post(body, services.settings.owner, idempotency_key)
    response.headers["location"] = f"/v1/sweeps/{sweep.id}"
    if not is_new:
        response.status_code = 200
    return _full_view(services, sweep.id)


@router.get("/sweeps")
def get_sweeps(
    services: ServicesDependency,
    state: Annotated[Sequence[str], Query(description="one or more states")] = (),
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
    cursor: str | None = None,
) -> dict[str, Any]:
    """Sweeps, newest first, with the number of their jobs in each state."""
    before = read_cursor(cursor) if cursor else None
    with services.database.read() as tx:
        sweeps = list_sweeps(tx, _states(state), without=SweepState.DELETED, before=before, limit=limit + 1)
        counts = states_of_members(tx, [sweep.number for sweep in sweeps])
    page = sweeps[:limit]
    return {
        "items": [_summary(sweep, counts[sweep.number]) for sweep in page],
        "next_cursor": write_cursor(page[-1].number) if len(sweeps) > limit else None,
    }


@router.get("/sweeps/{sweep_id}", responses=refusals(NotFound, Gone))
def get_sweep(sweep_id: SweepId, services: ServicesDependency) -> dict[str, Any]:
    """A sweep with its members, the best first: values, state, and `value`, the last of the metric; with the decisions
    at its rungs, and their reasons."""
    return _full_view(services, sweep_id)


@router.post("/sweeps/{sweep_id}/pause", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def pause_sweep(sweep_id: SweepId, services: ServicesDependency) -> dict[str, Any]:
    """Requests a checkpoint of all members that run and the release of their workers; no other member is started or
    chosen until the sweep is resumed."""
    services.sweeps.pause(sweep_id, services.settings.owner)
    return _full_view(services, sweep_id)


@router.post("/sweeps/{sweep_id}/resume", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def resume_sweep(sweep_id: SweepId, services: ServicesDependency) -> dict[str, Any]:
    """Continues a paused sweep: its paused members are queued again, at most `max_parallel` at a time, and go on from
    their checkpoints. 409 while a member is still pausing."""
    services.sweeps.resume(sweep_id, services.settings.owner)
    return _full_view(services, sweep_id)


@router.post("/sweeps/{sweep_id}/cancel", status_code=202, responses=refusals(NotFound, Gone, Conflict))
def cancel_sweep(sweep_id: SweepId, services: ServicesDependency) -> dict[str, Any]:
    """Requests the end of all members that have not ended."""
    services.sweeps.cancel(sweep_id, services.settings.owner)
    return _full_view(services, sweep_id)


@router.delete("/sweeps/{sweep_id}", status_code=202, responses=refusals(NotFound, Conflict))
def delete_sweep(sweep_id: SweepId, services: ServicesDependency) -> dict[str, Any]:
    """Deletes a sweep that has ended, with all its jobs; later requests for it get 410 once they are gone."""
    sweep = services.sweeps.delete(sweep_id, services.settings.owner)
    return _summary(sweep, {})


def _full_view(services: ServicesDependency, sweep_id: str) -> dict[str, Any]:
    with services.database.read() as tx:
        sweep = find_sweep(tx, sweep_id)
        rows = members_of(tx, sweep.number)
        values = [value_of_member(tx, row, sweep.metric) for row in rows]
        decisions = decisions_of(tx, sweep.number)
    counts: dict[str, int] = {}
    for row in rows:
        counts[state_of(row)] = counts.get(state_of(row), 0) + 1
    body = json.loads(sweep.body)
    is_max = body["sweep"].get("mode") == "max"

    def order(pair: tuple[MemberRow, MetricValue | None]) -> tuple[Any, ...]:
        row, value = pair
        return -row.rung, value is None, 0.0 if value is None else -value.value if is_max else value.value, row.number

    members = sorted(zip(rows, values, strict=True), key=order)
    return {
        **_summary(sweep, counts),
        "fields": list(body["sweep"]["fields"]),
        "rungs": json.loads(sweep.rungs),
        "decisions": [_decision_view(row) for row in decisions],
        "members": [_member_view(row, value) for row, value in members],
        "spec": body,
    }


def _summary(sweep: SweepRow, counts: dict[str, int]) -> dict[str, Any]:
    spec = json.loads(sweep.body)["sweep"]
    return {
        "id": sweep.id,
        "name": sweep.name,
        "owner": sweep.owner,
        "state": sweep.state,
        "reason": sweep.reason,
        "request": sweep.request,
        "method": spec["method"],
        "metric": sweep.metric,
        "mode": spec.get("mode", "min"),
        "num_members": sum(counts.values()),
        "members_by_state": counts,
        "created_at": time_text(sweep.created_at),
        "updated_at": time_text(sweep.updated_at),
        "finished_at": None if sweep.finished_at is None else time_text(sweep.finished_at),
    }


def _member_view(row: MemberRow, value: MetricValue | None) -> dict[str, Any]:
    return {
        "number": row.number,
        "job": row.job_id,
        "name": row.name,
        "state": state_of(row),
        "reason": row.reason,
        "step": row.step,
        "num_steps": row.num_steps,
        "values": json.loads(row.field_values),
        "value": None if value is None else value.value,
        "value_step": None if value is None else value.step,
        "rung": row.rung,
        "is_out": bool(row.is_out),
        "is_held": bool(row.held) and row.state == "queued",
    }


def _decision_view(row: DecisionRow) -> dict[str, Any]:
    return {"time": time_text(row.time), "actor": row.actor, **json.loads(row.data)}


def _states(entries: Sequence[str]) -> list[str]:
    states = [state for entry in entries for state in entry.split(",") if state]
    choices = [state for state in SweepState if state != SweepState.DELETED]
    for state in states:
        if state not in choices:
            rule, remedy = "is not a state of a sweep", f"use one of {', '.join(choices)}"
            problem = Problem("not_a_choice", "query.state", state, rule, remedy)
            raise Invalid(str(problem), problem)
    return states
