"""`/v1/jobs/{id}/generate`: text of a job's language model, streamed as it is generated."""

import json
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from moe.spec.errors import Problem
from moe.spec.generation import GenerationSpec
from moe.train.checkpoint import marker as markers
from service.control.api.body import SpecBody
from service.control.api.disconnect import unless_disconnected
from service.control.api.openapi import refusals
from service.control.api.problems import problem_body
from service.control.api.services import JobId, Services, ServicesDependency
from service.control.api.streams import EventStream
from service.control.errors import Conflict, Gone, Invalid, NotFound, ServiceError, Unavailable
from service.control.generation.generations import Generation, ServedModel
from service.control.jobs.stored_jobs import find_job
from service.wire.uses import GENERATE, refusal

router = APIRouter(prefix="/v1", tags=["jobs"])
_LOOK_S = 0.5
"""Interval of checks whether this service is stopping."""
_PROMPT = {"type": "string", "description": "The text to continue; the model reads it as the beginning of a document."}


def _schema() -> dict[str, Any]:
    fields = GenerationSpec.model_json_schema()
    return {
        "type": "object",
        "required": ["prompt"],
        "additionalProperties": False,
        "properties": {"prompt": _PROMPT, **fields["properties"]},
    }


_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}}


class GenerationStream(EventStream):
    """Events of a generated text, which is cancelled when its client disconnects."""

    def __init__(self, services: Services, generation: Generation) -> None:
        super().__init__(_events(services, generation), headers={"x-accel-buffering": "no"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.leave()


@router.post(
    "/jobs/{job_id}/generate",
    response_class=EventStream,
    openapi_extra=_BODY,
    responses=refusals(NotFound, Gone, Conflict),
)
async def post_generate(
    job_id: JobId, body: SpecBody, services: ServicesDependency, request: Request
) -> GenerationStream:
    """Continues `prompt` with the newest intact checkpoint of a language model's job; other fields are sampling
    options.

    Server-sent events: `text` with `{"text": ...}`, then `end` with `reason` (`end`, `max_tokens`, `stop`) and
    `num_tokens`, or `error` with a problem. `end` also has `tokens` with `log_probs: true`, and `notes` on settings of
    the model's `generation_config.json` that are not supported; those that are apply where the request has none.

    One model is loaded and one text generated at a time; a request whose turn does not come in time gets 503 with
    `Retry-After`. 409 without a loadable checkpoint, 422 for another kind of model. The service's settings limit tokens
    and time.
    """
    prompt, spec = _parse_request(body, services.settings.generation_max_tokens)
    model = await run_in_threadpool(_find_model, services, job_id)
    return GenerationStream(
        services, await unless_disconnected(request, services.generations.begin(model, prompt, spec))
    )


def _parse_request(body: Any, max_tokens: int) -> tuple[str, GenerationSpec]:
    """(prompt, spec) of a request. Raises Invalid and SpecError."""
    fields = dict(body) if isinstance(body, dict) and all(isinstance(key, str) for key in body) else {}
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str):
        problem = Problem("wrong_type", "prompt", prompt, "must be text", "give the text to continue")
        raise Invalid(str(problem), problem)
    default = GenerationSpec.model_fields["max_tokens"].default
    spec = GenerationSpec(**{"max_tokens": min(default, max_tokens), **fields})
    if spec.max_tokens > max_tokens:
        rule = f"must be at most {max_tokens:,} here"
        remedy = "request fewer, or ask the operator to raise SHARDYARD_GENERATION_MAX_TOKENS"
        problem = Problem("out_of_range", "max_tokens", spec.max_tokens, rule, remedy)
        raise Invalid(str(problem), problem)
    return prompt, spec


def _find_model(services: Services, job_id: str) -> ServedModel:
    """The job's model with its newest checkpoint. Raises NotFound, Gone, Invalid for another kind of model, Conflict
    without a checkpoint."""
    with services.database.read() as tx:
        job = find_job(tx, job_id)
    model = json.loads(job.spec)["model"]
    if reason := refusal(model.get("kind", "translation"), GENERATE, job_id):
        raise Invalid(reason)
    try:
        names = markers.list_committed(services.storage_roots.folder(job.storage).subfolder(markers.FOLDER))
    except OSError as error:
        raise Unavailable(f"cannot read the storage of {job_id}: {error}") from None
    if not names:
        raise Conflict(f"{job_id} has no committed checkpoint to generate with yet")
    location = services.storage_roots.find(job.storage)
    return ServedModel(job_id, names[0], job.storage, None if location is None else location[0])


async def _events(services: Services, generation: Generation) -> AsyncIterator[bytes]:
    ping_s = services.settings.ping_interval_s
    quiet_since = monotonic()
    while True:
        try:
            if services.hub.is_closed:
                raise Unavailable("this service is stopping")
            message = await generation.next(min(ping_s, _LOOK_S))
        except ServiceError as error:
            yield _event("error", problem_body(error.status, error.kind, error.detail, error.problems))
            return
        if message is None:
            if monotonic() - quiet_since < ping_s:
                continue
            yield b": ping\n\n"
        elif message.kind == "text":
            yield _event("text", {"text": message.text})
        else:
            details = {"notes": message.notes, "tokens": message.tokens}
            yield _event("end", {
                "reason": message.reason, "num_tokens": message.num_tokens,
                **{name: value for name, value in details.items() if value is not None},
            })  # fmt: skip
            return
        quiet_since = monotonic()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
