"""All errors as `application/problem+json` (RFC 9457)."""

import json
from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe.spec.errors import Problem, SpecError, in_words
from moe.spec.problems import code_of, dotted_path, rule_of
from service.control.errors import Full, ServiceError
from service.control.store.database import REMEDY, is_full
from service.control.store.database import in_words as database_in_words
from service.wire.problem_fields import problem_fields

MAX_SHOWN_CHARS = 200
MAX_SHOWN_PROBLEMS = 100
_TITLES = {
    400: "Malformed request",
    401: "Authentication required",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Unsupported media type",
    416: "Range not satisfiable",
    421: "Misdirected request",
    422: "Invalid request",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
    507: "Insufficient storage",
}
log = structlog.get_logger(__name__)


def problem_response(
    status: int,
    kind: str,
    detail: str,
    problems: Sequence[Problem] = (),
    members: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    # ASCII only: user input may contain surrogates, which UTF-8 cannot encode.
    body = json.dumps(problem_body(status, kind, detail, problems, members))
    return Response(body, status, headers, media_type="application/problem+json")


def problem_body(
    status: int, kind: str, detail: str, problems: Sequence[Problem] = (), members: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The problem as plain data, also for use inside other responses."""
    return {
        "type": f"urn:shardyard:problem:{kind}",
        "title": _TITLES.get(status, "Request refused"),
        "status": status,
        "detail": detail,
        "errors": [problem_fields(problem, MAX_SHOWN_CHARS) for problem in problems[:MAX_SHOWN_PROBLEMS]],
        **(members or {}),
    }


def refusal(error: ServiceError) -> Response:
    return problem_response(error.status, error.kind, error.detail, error.problems, error.members, error.headers)


def install(app: FastAPI) -> None:
    """Make every error of this app a problem response."""

    @app.exception_handler(ServiceError)
    async def handle_service_error(_request: Request, error: ServiceError) -> Response:
        return refusal(error)

    @app.exception_handler(SpecError)
    async def wrong_spec(_request: Request, error: SpecError) -> Response:
        return problem_response(422, "invalid-spec", str(error), error.problems)

    @app.exception_handler(RequestValidationError)
    async def wrong_parameters(_request: Request, error: RequestValidationError) -> Response:
        problems = [_parameter(entry) for entry in error.errors()]
        return problem_response(422, "invalid", in_words(problems, "; "), problems)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        kind = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "http")
        detail = f"there is no route {request.method} {request.url.path[:MAX_SHOWN_CHARS]}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:
            headers["allow"] = ", ".join(_served_methods(request))
        return problem_response(error.status_code, kind, detail, headers=headers)

    @app.exception_handler(ClientDisconnect)
    async def handle_client_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
        return problem_response(400, "malformed-request", "the body ended early")  # nobody reads this

    @app.exception_handler(DBAPIError)
    async def no_store(_request: Request, error: DBAPIError) -> Response:
        if (failure := database_in_words(error)) is None:
            raise error
        return refusal(failure)

    @app.exception_handler(UnicodeEncodeError)
    async def no_file_name(_request: Request, error: UnicodeEncodeError) -> Response:
        rule = f"cannot be a file name here: the service's file names are {error.encoding}"
        remedy = "use other names, or start the service under a UTF-8 locale (LC_ALL=C.UTF-8)"
        problem = Problem("invalid_encoding", "body", ascii(error.object)[1:-1], rule, remedy)
        return problem_response(422, "invalid", str(problem), [problem])

    @app.exception_handler(OSError)
    async def no_room(_request: Request, error: OSError) -> Response:
        if not is_full(error):
            raise error
        return refusal(Full(f"no space left to store it ({error.strerror}); {REMEDY}"))


class Failures:
    """ASGI middleware for unhandled exceptions; Starlette's own would log them twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise  # the server closes the connection
            log.error("a request failed", method=scope["method"], path=scope["path"], exc_info=error)
            answer = problem_response(500, "internal", "internal error; see the service's log")
            await answer(scope, receive, send)


def _served_methods(request: Request) -> list[str]:
    """Methods of this path over all routes: the framework names the first route's only."""
    methods = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return ["HEAD", *methods] if "GET" in methods else methods


def _parameter(entry: Any) -> Problem:
    path = dotted_path(entry["loc"])
    if entry["type"] == "missing":
        return Problem("missing", path, None, "is required", "add it")
    return Problem(code_of(entry["type"]), path, entry.get("input"), rule_of(entry), "correct it or omit it")
