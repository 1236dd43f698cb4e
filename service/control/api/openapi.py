"""The OpenAPI document: FastAPI's, with authentication and error responses added."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi

from moe.spec.errors import PROBLEM_CODES, Problem, in_words
from service.control.errors import (
    AuthenticationError,
    BodyTooLarge,
    Forbidden,
    Full,
    Invalid,
    MalformedRequest,
    MisdirectedRequest,
    ServiceError,
    Unavailable,
    UnsupportedMediaType,
)

OPEN_PATHS = ("/healthz", "/readyz", "/docs", "/openapi.json", "/login", "/v1/session")
"""Paths served without the token."""
_OPEN_FOLDERS = ("/static/",)
_ANYWHERE = (MalformedRequest, Forbidden, MisdirectedRequest, Invalid, Unavailable)
"""Errors of any request: its headers, its query, an unavailable store."""
_OF_BODIES = (BodyTooLarge, UnsupportedMediaType, Full)
_PROBLEM = {
    "type": "object",
    "title": "Problem",
    "description": "RFC 9457.",
    "required": ["type", "title", "status", "detail", "errors"],
    "properties": {
        "type": {"type": "string", "description": "`urn:shardyard:problem:<kind>`, stable, for programs"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "for people"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["code", "path", "value", "rule", "remedy"],
                "properties": {
                    "code": {"type": "string", "enum": list(PROBLEM_CODES)},
                    "path": {"type": "string"},
                    "value": {},
                    "rule": {"type": "string"},
                    "remedy": {"type": "string"},
                },
            },
        },
    },
}


def is_open(path: str) -> bool:
    """Whether a path is served without the token."""
    return path in OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


def refusals(*errors: type[ServiceError]) -> dict[int | str, dict[str, Any]]:
    """Error responses of a route, besides those of any route."""
    return {error.status: _refusal((error.__doc__ or error.kind).splitlines()[0]) for error in errors}


def describe(app: FastAPI, *, asks_token: bool) -> None:
    """Add authentication and each route's error responses to the app's OpenAPI document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, asks_token)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _document(app: FastAPI, asks_token: bool) -> dict[str, Any]:
    document: dict[str, Any] = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    document["security"] = [{"token": []}] if asks_token else []
    components = document.setdefault("components", {})
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "description": "SHARDYARD_TOKEN of the service, if set"}
    }
    components.setdefault("schemas", {})["Problem"] = _PROBLEM
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, which this service never sends
        components["schemas"].pop(name, None)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            common: tuple[type[ServiceError], ...] = _ANYWHERE
            if is_open(path):
                operation["security"] = []
            else:
                common = (*common, AuthenticationError)
            if method == "post":
                common = (*common, *_OF_BODIES)
            responses = operation["responses"]
            responses.pop("422", None)
            common_responses = {str(status): answer for status, answer in refusals(*common).items()}
            failure_response = {"500": _refusal("The service failed; see its log.")}
            operation["responses"] = dict(sorted({**common_responses, **failure_response, **responses}.items()))
    return document


def _refusal(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {"application/problem+json": {"schema": schema}}}


async def refuse_unknown_parameters(request: Request) -> None:
    """Raises Invalid for an unknown query parameter, which would be silently ignored."""
    parameters = request.query_params
    if not parameters:
        return
    path = request.scope["route"].path
    operation = request.app.openapi()["paths"].get(path, {}).get(request.method.lower(), {})
    known_names = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
    remedy = f"use {', '.join(known_names)}" if known_names else "omit it: this route has no parameters"
    problems = [
        Problem("unknown_key", f"query.{name[:100]}", value, f"is not a parameter of {request.method} {path}", remedy)
        for name, value in parameters.items()
        if name not in known_names
    ]
    if problems:
        raise Invalid(in_words(problems, "; "), problems)
