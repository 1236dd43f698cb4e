"""`/v1/uploads`: users' files, received in parts and named in specs as `upload://DIGEST/NAME`."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from moe.spec.errors import SpecError
from moe.spec.problems import problems_of
from service.control.api.body import NoBody, SpecBody, read_bounded
from service.control.api.guard import UPLOADED_FILES
from service.control.api.openapi import refusals
from service.control.api.services import ServicesDependency
from service.control.errors import BodyTooLarge, Conflict, Full, NotFound
from service.control.report.event_text import time_text
from service.control.uploads.uploads import Manifest, url_of
from service.wire.uploads import HASH, MAX_PART_BYTES, UploadSpec

router = APIRouter(tags=["uploads"])
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": UploadSpec.model_json_schema()}}}
}
_PART: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": {}}}}


async def _part_body(request: Request) -> bytes:
    return await read_bounded(request, MAX_PART_BYTES)


@router.post("/v1/uploads", openapi_extra=_BODY, responses=refusals(Full))
def post_upload(body: SpecBody, services: ServicesDependency) -> dict[str, Any]:
    """Says what is missing of an upload: `offsets` has the bytes received of each file, by SHA-256, that is not
    complete. Send those with PATCH, and post the same again: with no offsets left the upload is stored, and `complete`.
    Files that the service has, from any upload, are never sent again."""
    try:
        spec = UploadSpec.model_validate(body)
    except ValidationError as error:
        raise SpecError(problems_of(error)) from None
    receipt = services.uploads.begin(spec)
    return {
        "digest": receipt.digest,
        "url": url_of(receipt.digest),
        "complete": receipt.is_complete,
        "offsets": receipt.offsets,
        "max_part_bytes": MAX_PART_BYTES,
    }


@router.patch(
    UPLOADED_FILES + "{sha256}", openapi_extra=_PART, responses=refusals(NotFound, Conflict, BodyTooLarge, Full)
)
async def patch_file(
    sha256: Annotated[str, Path(pattern=f"^{HASH.pattern}$")],
    upload_offset: Annotated[int, Header(ge=0, le=1 << 60)],
    upload_length: Annotated[int, Header(ge=0, le=1 << 60)],
    body: Annotated[bytes, Depends(_part_body)],
    services: ServicesDependency,
) -> dict[str, Any]:
    """Appends a part to a file of `Upload-Length` bytes. `Upload-Offset` must be the bytes received so far: a 409 has
    the right one in the same header. With the last part the hash is checked; a file with another hash is dropped."""
    offset = await run_in_threadpool(services.uploads.append, sha256, upload_length, upload_offset, body)
    return {"sha256": sha256, "offset": offset, "complete": offset == upload_length}


@router.get("/v1/uploads")
def get_uploads(services: ServicesDependency) -> dict[str, Any]:
    """Complete uploads, newest first."""
    return {"items": [_view(digest, manifest) for digest, manifest in services.uploads.list_all()]}


@router.get("/v1/uploads/{digest}", responses=refusals(NotFound))
def get_upload(digest: str, services: ServicesDependency) -> dict[str, Any]:
    """An upload with its files."""
    manifest = services.uploads.find(digest)
    files = [{"name": name, **file.model_dump()} for name, file in sorted(manifest.spec.files.items())]
    return {**_view(digest, manifest), "files": files}


@router.delete("/v1/uploads/{digest}", responses=refusals(NotFound, Conflict))
def delete_upload(digest: str, services: ServicesDependency, _body: NoBody) -> dict[str, Any]:
    """Removes an upload; 409 while a job that has not ended names it."""
    return _view(digest, services.uploads.remove(digest))


def _view(digest: str, manifest: Manifest) -> dict[str, Any]:
    return {
        "digest": digest,
        "url": url_of(digest),
        "created_at": time_text(manifest.created_at_us),
        "num_files": len(manifest.spec.files),
        "size_bytes": manifest.spec.size_bytes,
    }
