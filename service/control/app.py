"""The control plane as an ASGI app, with its start and shutdown."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from service.control.api import (
    checkpoints,
    curves,
    docs,
    files,
    generate,
    health,
    history,
    jobs,
    log_lines,
    login,
    openapi,
    plans,
    problems,
    records,
    setup,
    streams,
    sweeps,
    uploads,
    webhooks,
)
from service.control.api.guard import Guard
from service.control.api.health import Head
from service.control.api.sessions import Sessions
from service.control.api.timing import Timing
from service.control.composition import open_services
from service.control.launcher.launcher import Launcher
from service.control.report.hub import Hub
from service.control.report.prometheus import Figures
from service.control.tracking import tracking
from service.control.webhooks import deliveries
from service.settings import Settings
from service.web import web
from service.web.page import compile_templates


def create_app(settings: Settings, launcher: Launcher) -> FastAPI:
    """The app. Its lifespan migrates the store, runs the controller, and finally releases the lease."""
    figures = Figures()
    hub = Hub()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # built once, not during a request
        hub.open(asyncio.get_running_loop())
        services = await asyncio.to_thread(open_services, settings, launcher, hub, figures)
        app.state.services = services

        def control() -> None:
            services.recovery.run_if_empty()  # before the first decision
            services.controller.run(settings.controller_interval_s)

        controlling = threading.Thread(target=control, name="controller", daemon=True)
        controlling.start()
        threading.Thread(target=compile_templates, name="templates", daemon=True).start()
        end_tracking = tracking.start(services.tracking)
        end_deliveries = deliveries.start(services.deliveries)
        try:
            yield
        finally:
            hub.close()
            services.controller.stop()
            services.modules.close()
            await services.generations.close()
            await asyncio.to_thread(end_tracking, settings.shutdown_s)
            await asyncio.to_thread(end_deliveries, settings.shutdown_s)
            # A call to the cluster may hang; the lease then expires after the process's end.
            await asyncio.to_thread(controlling.join, settings.shutdown_s)
            launcher.close()
            if not controlling.is_alive():
                services.database.close()

    app = FastAPI(
        title="Shardyard",
        summary="Trains mixture-of-experts models on a Ray cluster from one POST.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads external scripts; ours is `docs`
        redoc_url=None,
        dependencies=[Depends(openapi.refuse_unknown_parameters)],
    )
    app.state.hub = hub
    app.state.sessions = own_sessions = sessions_of(settings)
    problems.install(app)
    for module in (
        jobs,
        checkpoints,
        sweeps,
        curves,
        history,
        log_lines,
        generate,
        streams,
        files,
        plans,
        webhooks,
        uploads,
        setup,
        login,
        records,
        health,
        docs,
    ):
        app.include_router(module.router)
    openapi.describe(app, asks_token=settings.token is not None)
    app.add_middleware(problems.Failures)
    app.add_middleware(Head)
    app.add_middleware(Guard, settings=settings, sessions=own_sessions)
    web.install(app)
    app.add_middleware(Timing, figures=figures)
    return app


def sessions_of(settings: Settings) -> Sessions | None:
    """Browsers' sessions, for a service with a token."""
    if settings.token is None:
        return None
    return Sessions(settings.token.get_secret_value().encode(), round(settings.session_hours * 3600))
