"""Checks every request: for this host, not from a foreign web page, with the token if one is set.

Browsers send what any page requests, from inside the network. A page of another origin, including one whose name
resolves to this host (DNS rebinding), must not be able to do or read anything.
"""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.control.api.openapi import is_open
from service.control.api.problems import refusal
from service.control.api.sessions import Sessions
from service.control.errors import (
    AuthenticationError,
    Forbidden,
    MalformedRequest,
    MisdirectedRequest,
    ServiceError,
    UnsupportedMediaType,
)
from service.settings import Settings

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_PROBES = ("/healthz", "/readyz")
"""Paths that may be requested under any host name, by probes: they reveal little."""
_READ_BODIES = ("application/json", "application/yaml")
_FILE_BODIES = ("application/octet-stream",)
"""Not a type that forms of web pages can send either."""
UPLOADED_FILES = "/v1/uploads/files/"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


class Guard:
    """ASGI middleware that rejects unsafe requests."""

    def __init__(self, app: ASGIApp, settings: Settings, sessions: Sessions | None) -> None:
        """`sessions` of the service's token; None if it has no token."""
        self._app, self._sessions = app, sessions
        own_hosts = (settings.host, urlsplit(settings.events_url).hostname or "", *settings.allowed_hosts)
        self._hosts = frozenset(_hosts((*_LOOPBACK_NAMES, *own_hosts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        is_user = self._has_token(headers) or self._has_session(headers)
        scope.setdefault("state", {})["is_user"] = is_user
        try:
            if self._check(scope["method"], path, headers, is_user):
                admit(scope)
        except ServiceError as error:
            await refusal(error)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, method: str, path: str, headers: Headers, is_user: bool) -> bool:
        """Whether to count the connection as authenticated. Raises ServiceError to reject the request."""
        if path not in _PROBES:
            self._check_host(headers)
        self._check_origin(method, headers)
        is_public = is_open(path) or path.startswith("/internal/")
        if not is_user and not is_public:
            raise AuthenticationError(
                "this service requires 'Authorization: Bearer <token>' with its token",
                headers={"www-authenticate": "Bearer"},
            )
        if method not in _SAFE_METHODS and not is_public and not self._has_token(headers):
            _check_own_page(headers)
        _check_content_type(method, path, headers)
        return not is_public

    def _check_host(self, headers: Headers) -> None:
        host_headers = headers.getlist("host")
        if len(host_headers) != 1:
            raise MalformedRequest("a request must have exactly one Host header")
        host = _host_name(host_headers[0])
        if host not in self._hosts:
            raise MisdirectedRequest(
                f"this service does not serve the host {(host or host_headers[0])[:200]!r}; the "
                "operator can add it to SHARDYARD_ALLOWED_HOSTS"
            )

    def _check_origin(self, method: str, headers: Headers) -> None:
        origin = headers.get("origin")
        # Only this service's own pages may use it: their origin is the request's host.
        if origin is not None and _place(origin) != (headers.get("host") or "").lower():
            raise Forbidden(f"pages of {origin[:200]!r} may not use this service")
        site = headers.get("sec-fetch-site", "none")
        if method not in _SAFE_METHODS and site not in ("none", "same-origin"):
            raise Forbidden("pages of another origin may not use this service")

    def _has_token(self, headers: Headers) -> bool:
        """Whether the request has the token, or none is configured."""
        if self._sessions is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return self._sessions.is_token(token.strip().encode() if scheme.lower() == "bearer" else b"")

    def _has_session(self, headers: Headers) -> bool:
        """Whether the request has a session's cookie."""
        if self._sessions is None or "cookie" not in headers:
            return False
        return self._sessions.is_session(cookie_parser(headers["cookie"]).get(self._sessions.cookie))


def admit(scope: Scope) -> None:
    """Count the request's connection as authenticated, if the server counts connections. Raises Unavailable."""
    if (connection := scope.get("state", {}).get("connection")) is not None:
        connection.admit()


def _check_own_page(headers: Headers) -> None:
    """Browsers add the session's cookie to requests, whoever causes them: a change must say that it comes from a page
    of this service. An Origin was compared with the host before."""
    if "origin" not in headers and headers.get("sec-fetch-site") != "same-origin":
        raise Forbidden("with a session's cookie, only pages of this service may change anything")


def _check_content_type(method: str, path: str, headers: Headers) -> None:
    if method in _SAFE_METHODS:
        return
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    content_type = headers.get("content-type")
    if content_type is None and not has_body:
        return
    # Forms can be posted across origins without preflight; these types cannot.
    allowed = _FILE_BODIES if method == "PATCH" and path.startswith(UPLOADED_FILES) else _READ_BODIES
    if media_type(content_type) not in allowed:
        raise UnsupportedMediaType(
            (f"the body must be {' or '.join(allowed)}, not {(content_type or 'without a content type')[:100]!r}"),
            headers={"accept": ", ".join(allowed)},
        )


def media_type(content_type: str | None) -> str:
    """`application/json` of `application/json; charset=utf-8`."""
    return (content_type or "").partition(";")[0].strip().lower()


def _host_name(host: str) -> str:
    """Host name without port; "" if invalid (RFC 9110)."""
    match = _HOST.fullmatch(host)
    return match["name"].lower().strip("[]").removesuffix(".") if match else ""


def _place(origin: str) -> str | None:
    """Host and port of an origin; None if it is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hosts(names: Iterable[str]) -> Iterable[str]:
    # Wildcards are addresses to listen on; requests do not name them.
    return (name.lower().strip("[]").rstrip(".") for name in names if name not in ("", "0.0.0.0", "::"))
