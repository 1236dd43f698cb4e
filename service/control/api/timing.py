"""Counts requests and their times by route."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.control.report.prometheus import Figures

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Timing:
    """ASGI middleware. Measures the time to the first byte, also of streams."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self._app, self._figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.perf_counter()

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Unknown paths and methods would create an unbounded number of labels.
                route = getattr(scope.get("route"), "path", None) or "unknown"
                method = scope["method"] if route != "unknown" and scope["method"] in _METHODS else "any"
                self._figures.requests.labels(method, route, str(message["status"])).inc()
                self._figures.request_seconds.labels(method, route).observe(time.perf_counter() - start_s)
            await send(message)

        await self._app(scope, receive, send_and_count)
