"""Liveness, readiness and metrics for operators; HEAD for every GET route."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.control.api.services import ServicesDependency
from service.control.errors import Full, Unavailable
from service.control.store.clock import now_us
from service.control.store.leases import lease_holder


class Head:
    """ASGI middleware; the app sees a GET. A stream ends once its headers are sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # HEAD is answered; the route, if it still writes the body, sees a disconnected client.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        # Changed in place: outer middleware reads the route from this scope.
        scope["method"] = "GET"
        await self._app(scope, receive, send_headers)


router = APIRouter(tags=["health"])
_STUCK_S = 120.0
"""A longer controller step hangs: calls to the cluster time out earlier."""


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process responds."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(request: Request, services: ServicesDependency) -> dict[str, Any]:
    """The store is readable and the controller runs; `controller` says whether this control plane acts. While
    nothing can be written, `status` is `degraded` and `writing` gives the reason (without the token, only `full` or
    `unavailable`)."""
    try:
        with services.database.read() as tx:
            holder = lease_holder(tx, now_us())
    except Unavailable as unavailable:
        raise (unavailable if request.state.is_user else Unavailable("the store does not respond")) from None
    except Exception as error:
        raise Unavailable(f"the store does not respond: {type(error).__name__}") from None
    last = services.controller.last_step_at
    if last is not None and time.monotonic() - last > _STUCK_S:
        raise Unavailable(f"the controller's last step ended {time.monotonic() - last:.0f} s ago")
    services.requests.full_roots.check_soon()
    fault = services.database.fault or services.requests.full_roots.fault
    status = {
        "status": "degraded" if fault else "ready",
        "writing": "ok" if fault is None else "full" if isinstance(fault, Full) else "unavailable",
        "controller": "acting" if services.controller.acting else "standing by",
    }
    if not request.state.is_user:
        return status
    return {**status, "writing": fault.detail if fault else "ok", "holder": holder}


@router.get("/metrics")
def metrics(services: ServicesDependency) -> Response:
    """Metrics in Prometheus's text format."""
    services.figures.acting.set(services.controller.acting)
    services.figures.cluster_answers.set(services.controller.cluster_answers)
    return Response(services.figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
