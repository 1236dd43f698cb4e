"""`/v1/session`: a cookie for browsers, in exchange for the token."""

from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from service.control.api.body import NoBody, parse, read_bounded
from service.control.api.openapi import refusals
from service.control.api.sessions import Sessions
from service.control.errors import Invalid, TooManyRequests

router = APIRouter(prefix="/v1", tags=["session"])
MAX_BODY_BYTES = 8192
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "object", "required": ["token"], "properties": {"token": {"type": "string"}}}
            }
        },
    }
}


async def _token(request: Request) -> bytes:
    """`token` of the body. Raises Invalid, which does not repeat its value."""
    body = parse(await read_bounded(request, MAX_BODY_BYTES), "json")
    if not isinstance(body, dict) or set(body) != {"token"} or not isinstance(body["token"], str):
        raise Invalid('the body must be {"token": "..."}')
    try:
        return body["token"].encode()
    except UnicodeEncodeError:
        return b""  # a lone surrogate, which no token has


@router.post("/session", status_code=204, openapi_extra=_BODY, responses=refusals(TooManyRequests))
async def open_session(request: Request, token: Annotated[bytes, Depends(_token)]) -> Response:
    """Exchanges the token, in `{"token": "..."}`, for a session cookie. A service without a token sets none."""
    sessions: Sessions | None = request.app.state.sessions
    response = Response(status_code=204)
    if sessions is not None:
        address = request.client.host if request.client else ""
        _set_cookie(request, response, sessions, sessions.open(token, address), sessions.lifetime_s)
    return response


@router.delete("/session", status_code=204)
async def close_session(request: Request, _body: NoBody) -> Response:
    """Removes the session cookie."""
    response = Response(status_code=204)
    if (sessions := request.app.state.sessions) is not None:
        _set_cookie(request, response, sessions, "", 0)
    return response


def _set_cookie(request: Request, response: Response, sessions: Sessions, value: str, lifetime_s: int) -> None:
    response.set_cookie(
        sessions.cookie, value, max_age=lifetime_s, path="/", httponly=True, samesite="strict", secure=_is_tls(request)
    )


def _is_tls(request: Request) -> bool:
    """Whether the browser connects by TLS, possibly to a proxy: a client that lies only affects its own cookie."""
    schemes = (
        request.url.scheme,
        request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower(),
        urlsplit(request.headers.get("origin", "")).scheme,  # the guard has checked it
    )
    return "https" in schemes
