"""Request bodies, read up to a limit; syntax errors have line and column."""

from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from moe.spec import MAX_SPEC_BYTES, Problem, SpecError, parse_text
from moe.spec.errors import in_words
from service.control.api.guard import media_type
from service.control.errors import BodyTooLarge, Invalid, MalformedRequest
from service.wire.events import MAX_BATCH_BYTES

QUICK_BYTES = 20_000
"""JSON up to this size parses faster than a thread switch."""


async def read_bounded(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge without reading beyond the limit."""
    remedy = f"send at most {max_bytes:,} bytes"
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise BodyTooLarge(f"a body of {length} bytes is too large; {remedy}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body is too large; {remedy}")
    return bytes(body)


async def _spec_body(request: Request) -> Any:
    is_yaml = media_type(request.headers.get("content-type")) == "application/yaml"
    body = await read_bounded(request, MAX_SPEC_BYTES)
    if is_yaml or len(body) > QUICK_BYTES:
        return await run_in_threadpool(parse, body, "yaml" if is_yaml else "json")
    return parse(body, "json")


async def _batch_body(request: Request) -> bytes:
    return await read_bounded(request, MAX_BATCH_BYTES)


async def _no_body(request: Request) -> None:
    """Raises Invalid for a body with content, on routes that take none."""
    body = await read_bounded(request, QUICK_BYTES)
    content = parse(body, "json") if body.strip() else None
    if content is None or content == {}:
        return
    remedy = "remove it: this route takes no body"
    problems = (
        [Problem("unknown_key", key, value, "is not a known key", remedy) for key, value in content.items()]
        if isinstance(content, dict)
        else [Problem("wrong_type", "body", None, "must be empty", "send no body")]
    )
    raise Invalid(in_words(problems, "; "), problems)


def parse(body: bytes, format: str) -> Any:
    """Parse into plain data. Raises MalformedRequest with line and column."""
    try:
        return parse_text(body.decode(), "body", format)
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"the body is not valid UTF-8: invalid byte at offset {error.start}") from None
    except SpecError as error:
        raise MalformedRequest(str(error), error.problems) from None


SpecBody = Annotated[Any, Depends(_spec_body)]
NoBody = Annotated[None, Depends(_no_body)]
BatchBody = Annotated[bytes, Depends(_batch_body)]
