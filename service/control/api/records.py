"""`/internal/v1`: runs post their records here, authorized by their attempt's token."""

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from moe.spec.errors import Problem
from moe.spec.problems import code_of, dotted_path, rule_of
from service.control.api.body import BatchBody
from service.control.api.guard import admit
from service.control.api.services import JobId, ServicesDependency
from service.control.errors import Invalid
from service.wire.events import RecordAnswer, RecordBatch

router = APIRouter(prefix="/internal/v1", include_in_schema=False)


async def _authorize(
    request: Request,
    job_id: JobId,
    services: ServicesDependency,
    authorization: Annotated[str, Header(max_length=300)] = "",
) -> str:
    """Token of the job's newest attempt. Raises NotFound, Forbidden."""
    scheme, _, token = authorization.partition(" ")
    credentials = token if scheme.lower() == "bearer" else ""
    await run_in_threadpool(services.ingest.admit, job_id, credentials)
    admit(request.scope)
    return credentials


@router.post("/jobs/{job_id}/records")
def post_records(
    job_id: JobId,
    token: Annotated[str, Depends(_authorize)],  # before the body, which is not read from strangers
    body: BatchBody,
    services: ServicesDependency,
) -> RecordAnswer:
    """Store records, each once. 409 names the record to continue from; 403: no more are accepted."""
    batch = _batch(body)
    answer = services.ingest.take(job_id, token, batch)
    for record in batch.records:
        services.figures.records.labels(record.kind).inc()
    return answer


def _batch(body: bytes) -> RecordBatch:
    try:
        return RecordBatch.model_validate_json(body)
    except ValidationError as error:
        problems = [
            Problem(
                code_of(entry["type"]),
                dotted_path(entry["loc"]) or "body",
                None,
                rule_of(entry),
                "send records as events.py defines them",
            )
            for entry in error.errors(include_url=False, include_input=False)[:10]
        ]
        raise Invalid("; ".join(map(str, problems)), problems) from None
