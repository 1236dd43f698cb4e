"""Curves and expert loads of a job, of bounded size for pictures."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from service.control.api.openapi import refusals
from service.control.api.services import Job, ServicesDependency
from service.control.errors import Gone, NotFound
from service.control.report.expert_loads import expert_loads
from service.control.report.label_shares import label_shares

router = APIRouter(prefix="/v1", tags=["jobs"])
_MAX_STEP = 2**31
_Step = Annotated[int, Query(ge=0, lt=_MAX_STEP)]
_LastStep = Annotated[int | None, Query(ge=0, lt=_MAX_STEP)]


@router.get("/jobs/{job_id}/curves", response_class=JSONResponse, responses=refusals(NotFound, Gone))
def get_curves(
    job: Job,
    services: ServicesDependency,
    name: Annotated[Sequence[str], Query(max_length=100, description="one or more names; none: only lists them")] = (),
    since_step: _Step = 0,
    until_step: _LastStep = None,
    max_points: Annotated[int, Query(ge=1, le=10_000, description="of each curve")] = 1000,
) -> JSONResponse:
    """Numbers by step, as columns: `step`, `time_ms` (milliseconds since 1970), `attempt` and `value` (null: not
    finite) of each `name`, such as `loss` or `held_out.books`, thinned with the extremes of each stretch. `names`:
    all recorded ones, of which a job has at most 500; `has_more_names`: it recorded others too, which are only in its
    metrics. The event stream continues after `last_event_id`."""
    with services.curves.read(job.number) as columns:
        curves = {
            key: columns.curve(key, since_step, until_step, max_points) for key in name if key in set(columns.names)
        }
        names, has_more_names = columns.names, columns.has_more_names
        num_steps, last_event_id = columns.num_steps(), columns.read_to
    # Thousands of numbers bypass FastAPI's encoding.
    return JSONResponse(
        {
            "names": names,
            "has_more_names": has_more_names,
            "num_steps": num_steps,
            "last_event_id": last_event_id,
            "curves": {
                key: {
                    "step": curve.step,
                    "time_ms": [time_us // 1000 for time_us in curve.time_us],
                    "attempt": curve.attempt,
                    "value": curve.value,
                }
                for key, curve in curves.items()
            },
        }
    )


@router.get("/jobs/{job_id}/experts", response_class=JSONResponse, responses=refusals(NotFound, Gone))
def get_experts(
    job: Job,
    services: ServicesDependency,
    layer: Annotated[
        Sequence[int], Query(max_length=64, description="layers with loads; default: the worst-balanced")
    ] = (),
    since_step: _Step = 0,
    until_step: _LastStep = None,
    max_points: Annotated[int, Query(ge=1, le=500, description="sampled steps, evenly spread")] = 60,
    max_layers: Annotated[int, Query(ge=1, le=64, description="layers with loads")] = 8,
    max_experts: Annotated[int, Query(ge=1, le=1024, description="columns of a layer's loads")] = 128,
) -> JSONResponse:
    """Expert loads over time. `layers`: every MoE layer, the worst-balanced first (mean over the sampled steps of the
    busiest expert's load over the mean load). `loads`: of the first layers, by sampled step, the load of each expert
    as a multiple of the mean; of more than `max_experts` experts, `experts_per_bucket` neighbours have that of their
    busiest."""
    with services.curves.read(job.number) as columns:
        event_ids = columns.step_ids(since_step, until_step, max_points)
    return JSONResponse(expert_loads(services.database, job.number, event_ids, layer, max_layers, max_experts))


@router.get("/jobs/{job_id}/experts/labels", response_class=JSONResponse, responses=refusals(NotFound, Gone))
def get_expert_labels(
    job: Job,
    services: ServicesDependency,
    layer: Annotated[
        Sequence[int], Query(max_length=64, description="layers with shares; default: the most specialized")
    ] = (),
    until_step: _LastStep = None,
    max_layers: Annotated[int, Query(ge=1, le=64, description="layers with shares")] = 8,
    max_experts: Annotated[int, Query(ge=1, le=1024, description="columns of a layer's shares")] = 128,
) -> JSONResponse:
    """Which sources, roles or languages (`kind`) go to which experts, on held-out tokens of the newest evaluation up
    to `until_step`; `step` is null if none has recorded it. `layers`: every MoE layer, the most specialized first.
    `specialization`: mean over labels of the share of a label's choices that other experts would get if it used the
    experts as the mean of the labels does; 0 if all labels use them alike. `shares`: of the first layers, by label,
    the share of its choices that each expert got; of more than `max_experts` experts, `experts_per_bucket` neighbours
    have their sum."""
    with services.curves.read(job.number) as columns:
        event_ids = columns.text_ids("label_loads", 0, until_step, 1)
    return JSONResponse(label_shares(services.database, job.number, event_ids, layer, max_layers, max_experts))
