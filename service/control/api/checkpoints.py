"""`/v1/jobs/{id}/checkpoints`: committed checkpoints of a job, and their verification."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool

from moe.train.checkpoint import marker as markers
from service.control.api.body import NoBody
from service.control.api.disconnect import unless_disconnected
from service.control.api.openapi import refusals
from service.control.api.services import Job, Place, ServicesDependency
from service.control.errors import Gone, NotFound, Unavailable
from service.control.report.checkpoints import list_checkpoints

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/jobs/{job_id}/checkpoints", responses=refusals(NotFound, Gone))
def get_checkpoints(job: Job, services: ServicesDependency) -> dict[str, Any]:
    """Committed checkpoints, oldest first, from their markers on storage."""
    try:
        checkpoints = list_checkpoints(services.storage_roots.folder(job.storage))
    except OSError as error:
        raise Unavailable(f"cannot read the storage of {job.id}: {error}") from None
    return {"items": [checkpoint.to_plain() for checkpoint in checkpoints], "next_cursor": None}


@router.post("/jobs/{job_id}/checkpoints/{checkpoint}/verification", responses=refusals(NotFound, Gone))
async def verify_checkpoint(
    checkpoint: Annotated[str, Path(description="a step, for its newest checkpoint, or a checkpoint's name")],
    job: Place,
    services: ServicesDependency,
    request: Request,
    _body: NoBody,
) -> dict[str, Any]:
    """Reads all files of a checkpoint and compares them with the sizes and checksums in its marker. Answers when it
    has read them: `faults` is empty for an intact checkpoint. 404 for one that is removed meanwhile, 503 with
    `Retry-After` while two others are verified. Ends when the client disconnects."""
    # In the thread pool: the first use of a storage backend may be slow.
    folder = await run_in_threadpool(lambda: services.storage_roots.folder(job.storage).subfolder(markers.FOLDER))
    verification = await unless_disconnected(request, services.verifications.verify(folder, checkpoint))
    return verification.to_plain()
