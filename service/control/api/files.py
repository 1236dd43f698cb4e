"""`/v1/jobs/{id}/files`: a job's files, for clients that cannot reach its storage."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import IO, Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from service.control.api.openapi import refusals
from service.control.api.ranges import requested_range
from service.control.api.services import Job, Place, Services, ServicesDependency
from service.control.errors import Gone, NotFound, OutOfRange, Unavailable
from service.control.retention.job_files import JobFiles
from service.wire.file_kinds import FileKind

router = APIRouter(prefix="/v1", tags=["files"])
BLOCK_BYTES = 1 << 20
"""Block size of a download, which is all it holds in memory."""


@router.get("/jobs/{job_id}/files", responses=refusals(NotFound, Gone))
def get_files(
    job: Job,
    services: ServicesDependency,
    kind: Annotated[Sequence[FileKind], Query(max_length=10, description="default: all kinds")] = (),
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    cursor: Annotated[str | None, Query(max_length=1000)] = None,
) -> dict[str, Any]:
    """Downloadable files of a job, by path: spec, results, committed checkpoints, logs, profiler traces. Checkpoint
    files have the SHA-256 of their marker. Files that hold tokens are never included."""
    try:
        files = _files(services, job.storage).list_files(frozenset(kind) or frozenset(FileKind))
    except OSError as error:
        raise Unavailable(f"cannot read the storage of {job.id}: {error}") from None
    after = [file for file in files if cursor is None or file.path > cursor]
    page = after[:limit]
    return {"items": [asdict(file) for file in page], "next_cursor": page[-1].path if len(after) > limit else None}


@router.get(
    "/jobs/{job_id}/files/{path:path}",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}},
        206: {"description": "The requested part of the file"},
        **refusals(NotFound, Gone, OutOfRange),
    },
)
async def get_file(
    path: str,
    job: Place,
    services: ServicesDependency,
    range: Annotated[str | None, Header(max_length=100)] = None,
    if_range: Annotated[str | None, Header(max_length=200)] = None,
) -> StreamingResponse:
    """Download one file, or with `Range` one part of it: `bytes=N-`, `bytes=N-M` or `bytes=-N`. With the `ETag` of an
    earlier answer in `If-Range`, a file that has changed since is returned whole. Several ranges return the whole
    file."""
    try:
        # In the thread pool: the first use of a storage backend may be slow.
        served_file = await run_in_threadpool(lambda: _files(services, job.storage).open(path))
    except OSError as error:
        raise Unavailable(f"cannot read {path!r} of {job.id}: {error}") from None
    file, size_bytes, etag = served_file.file, served_file.size_bytes, f'"{served_file.version}"'
    try:
        part = requested_range(range, if_range, size_bytes, etag)
    except OutOfRange:
        file.close()
        raise
    start, end = (0, size_bytes) if part is None else (part.start, part.end)
    headers = {"content-length": str(end - start), "accept-ranges": "bytes", "etag": etag}
    if part is not None:
        headers["content-range"] = part.content_range(size_bytes)
    return StreamingResponse(
        _blocks(file, start, end),
        status_code=200 if part is None else 206,
        media_type="application/octet-stream",
        headers=headers,
    )


def _files(services: Services, storage: str) -> JobFiles:
    return JobFiles(services.storage_roots, storage)


async def _blocks(file: IO[bytes], start: int, end: int) -> AsyncIterator[bytes]:
    """Blocks up to `end`; a file that has become shorter breaks the connection."""
    with file:
        await run_in_threadpool(file.seek, start)
        while start < end and (block := await run_in_threadpool(file.read, min(BLOCK_BYTES, end - start))):
            start += len(block)
            yield block
