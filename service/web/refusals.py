"""Refusals of the API and the control plane as pages, for browsers."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.web.api import Refusal
from service.web.page import Web

_PROBLEM = "application/problem+json"
_FOR_PROGRAMS = ("/v1/", "/internal/", "/static/", "/fragments/")
"""Paths whose responses keep their format, whoever asks."""
REMEDIES = {
    400: "Check the address, or start again from the list of jobs.",
    401: "Log in with the token of this service.",
    403: "Open the page from this service itself, not from a link on another site.",
    404: "Check the address, or look for the job in the list.",
    405: "Start again from the list of jobs.",
    410: "Its files and records are gone. Other jobs are in the list.",
    421: "Use the address that this service was started with, or have its operator allow this host name.",
    422: "Correct the address, or start again from the list of jobs.",
    500: "The reason is in the service's log. Trying again may help.",
    503: "Reload the page in a moment. Jobs that are running go on.",
    507: "Have the operator free some space. Everything stored can still be read.",
}


class ProblemPages:
    """ASGI middleware: problem responses to browsers become pages, and a missing login leads to the login page."""

    def __init__(self, app: ASGIApp, web: Web) -> None:
        self._app, self._web = app, web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_for_a_person(scope):
            await self._app(scope, receive, send)
            return
        method = scope["method"]  # inner middleware changes it in place
        start: Message | None = None
        body = bytearray()

        async def send_unless_problem(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                if Headers(raw=message["headers"]).get("content-type") == _PROBLEM:
                    start = message
                    return
            elif start is not None:
                body.extend(message.get("body", b""))
                return
            await send(message)

        await self._app(scope, receive, send_unless_problem)
        if start is None:
            return
        headers = Headers(raw=start["headers"])
        page = self._page(Request({**scope, "method": method}), start["status"], bytes(body), headers)
        for name, value in headers.items():
            if name not in ("content-type", "content-length", "content-security-policy", "www-authenticate"):
                page.headers.setdefault(name, value)
        if method == "HEAD":
            page.body = b""
        await page(scope, receive, send)

    def _page(self, request: Request, status: int, body: bytes, headers: Headers) -> Response:
        if status == 401 and request.method in ("GET", "HEAD"):
            path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse("/login" if path == "/" else f"/login?next={quote(path, safe='')}", 303)
        problem = _problem(body, status)
        if status == 404:  # of routing: pages pass on the API's own words as a Refusal
            problem["detail"] = f"there is no page {request.url.path[:200]}"
        return problem_page(self._web, request, status, problem)


def problem_page(web: Web, request: Request, status: int, problem: Mapping[str, Any]) -> Response:
    """A page that says what failed, why, and what to do."""
    return web.render(
        request,
        "problem.html",
        status=status,
        problem_status=status,
        problem_title=str(problem.get("title") or "Request refused"),
        detail=str(problem.get("detail") or ""),
        remedy=REMEDIES.get(status, "Start again from the list of jobs."),
        headers={"retry-after": "5"} if status == 503 else None,
    )


def refusal_page(web: Web, request: Request, refusal: Refusal) -> Response:
    """A page for a refusal of an API route that the page needs."""
    return problem_page(web, request, refusal.status, refusal.problem)


def own_path(text: str) -> str:
    """A path of this service; `/` for anything that a browser would take for another site's address."""
    is_own = text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable()
    return text if is_own else "/"


def _is_for_a_person(scope: Scope) -> bool:
    accepts = Headers(scope=scope).get("accept", "")
    return "text/html" in accepts and not scope["path"].startswith(_FOR_PROGRAMS)


def _problem(body: bytes, status: int) -> dict[str, Any]:
    try:
        problem = json.loads(body)
    except ValueError:  # of a HEAD request
        problem = {"title": f"Status {status}"}
    return problem if isinstance(problem, dict) else {}
