"""The control plane as an ASGI app, with its start and shutdown."""

import asyncio
import os
import secrets
import socket
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
from service.control.api.services import Services
from service.control.api.sessions import Sessions
from service.control.api.timing import Timing
from service.control.generation.generations import GenerationLimits, Generations
from service.control.jobs.data_roots import DataRoots
from service.control.jobs.lease import Lease
from service.control.jobs.roots import StorageRoots
from service.control.launcher.launcher import Launcher
from service.control.report.curve_store import CurveStore
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.prometheus import ActiveJob, Figures
from service.control.report.saves import read_saves
from service.control.report.streams import EventStreams
from service.control.report.tokens import TokenMint
from service.control.report.verification import Verifications
from service.control.retention.deletions import Deletions
from service.control.retention.drafts import Drafts
from service.control.retention.retention import Retention
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.controller import Controller
from service.control.scheduling.module_plans import ModulePlans
from service.control.scheduling.orphans import Orphans
from service.control.scheduling.policies import Deadlines
from service.control.scheduling.recovery import Recovery
from service.control.scheduling.requests import Requests
from service.control.scheduling.spec_keeper import SpecKeeper
from service.control.scheduling.starter import Starter
from service.control.store.database import Database
from service.control.store.jobs import count_by_state, ends_of_queue, jobs_in
from service.control.sweeps.recovery import SweepRecovery
from service.control.sweeps.requests import SweepRequests
from service.control.sweeps.sweeps import Sweeps
from service.control.tracking import tracking
from service.control.tracking.tracking import Tracking
from service.control.uploads.uploads import UploadLimits, Uploads
from service.control.webhooks import deliveries
from service.control.webhooks.addresses import AddressRule
from service.control.webhooks.deliveries import Deliveries
from service.control.webhooks.sender import Sender
from service.control.webhooks.webhooks import Webhooks
from service.settings import Settings
from service.tracker.places import TrackerPlaces
from service.web import web
from service.web.page import compile_templates
from service.wire.states import ACTIVE, OVER, State


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


def open_services(settings: Settings, launcher: Launcher, hub: Hub, figures: Figures) -> Services:
    """Open everything that routes and the controller use, on a migrated store."""
    state_dir = settings.state_dir
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    state_dir.chmod(0o700)
    database = Database(settings.database_url)
    database.migrate()
    watch = ClusterWatch(launcher, settings.cache_dir)
    mint = TokenMint.of(database, state_dir)
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    lease = Lease(database, hub, holder, settings.lease_s)
    modules = ModulePlans(
        settings.allowed_code, settings.planning_timeout_s, settings.planning_memory_bytes,
        wake=lambda: controller.wake(),  # defined below
    )  # fmt: skip
    roots = StorageRoots(settings.storage_roots)
    uploads_ = Uploads(
        database, lease, roots,
        UploadLimits(settings.max_upload_bytes, settings.max_uploads_bytes, settings.abandoned_upload_s),
    )  # fmt: skip
    data_roots = DataRoots(settings.data_roots, uploads_.url)
    starter = Starter(
        database, lease, launcher, watch, mint,
        events_url=settings.events_url, cache=str(settings.cache_dir), data_roots=data_roots,
        allowed_code=settings.allowed_code, modules=modules,
    )  # fmt: skip
    retention = Retention(database, lease, settings.keep_jobs_days)
    drafts = Drafts(database, roots, settings.abandoned_after_s)
    deletions = Deletions(database, hub, lease, roots, wake=lambda: controller.wake(), forget=launcher.forget_job)
    # The controller needs ingest to catch up from storage, and ingest wakes the controller.
    ingest = Ingest(database, hub, mint, on_phase=lambda: controller.wake())
    controller = Controller(
        database,
        lease,
        launcher,
        starter,
        ingest,
        roots,
        Deadlines(settings.cancel_deadline_s, settings.pause_deadline_s, settings.lost_grace_s, settings.grow_after_s),
        chores=(
            Sweeps(database, lease, deletions).step,
            deletions.step,
            retention.step,
            drafts.step,
            uploads_.step,
            SpecKeeper(database, lease, roots).step,
            Orphans(database, lease, launcher, mint.instance).step,
        ),
    )
    launcher.on_change(controller.wake)
    places = TrackerPlaces(
        str(settings.tracking_dir), settings.mlflow_tracking_uri, settings.tracking_urls, settings.wandb_base_url,
        settings.has_wandb_key,
    )  # fmt: skip
    requests = Requests(
        database, hub, watch, roots, data_roots, controller.wake,
        allowed_code=settings.allowed_code, modules=modules, trackers=places, uploads=uploads_,
    )  # fmt: skip

    def count_jobs() -> dict[str, int]:
        with database.read() as tx:
            return count_by_state(tx)

    def oldest_queued_s() -> float | None:
        with database.read() as tx:
            ends = ends_of_queue(tx, State.QUEUED)
        return None if ends is None else ends[0] / 1e6

    def active_jobs() -> dict[str, ActiveJob]:
        with database.read() as tx:
            jobs = jobs_in(tx, ACTIVE)
        evaluates = ingest.statuses.is_evaluating
        return {
            job.id: ActiveJob(job.step, job.num_steps, read_saves(job.saves), evaluates(job.id, job.attempt))
            for job in jobs
        }

    figures.watch_jobs(count_jobs)
    figures.watch_queue(oldest_queued_s)
    figures.watch_active(active_jobs)
    generations = Generations(
        GenerationLimits(
            settings.generation_timeout_s,
            settings.generation_load_timeout_s,
            settings.generation_idle_s,
            settings.generation_memory_bytes,
        )
    )
    rule = AddressRule(settings.webhook_networks)
    sender = Sender(rule, settings.webhook_timeout_s)
    webhooks_ = Webhooks(database, sender, rule)
    webhooks_.set_operators(settings.webhooks, settings.owner)
    streams_ = EventStreams(database, hub, OVER, settings.ping_interval_s)
    return Services(
        settings,
        database,
        hub,
        streams_,
        ingest,
        requests,
        SweepRequests(database, hub, requests, controller.wake),
        deletions,
        roots,
        watch,
        controller,
        figures,
        modules,
        generations,
        Recovery(
            database,
            roots,
            launcher,
            ingest,
            settings.owner,
            state_dir,
            recover_sweeps=SweepRecovery(database, roots, settings.owner).run,
        ),
        Tracking(
            database,
            lease,
            ingest.statuses,
            places,
            interval_s=settings.tracking_interval_s,
            patience_s=settings.tracking_patience_s,
        ),
        CurveStore(database),
        webhooks_,
        Deliveries(
            database,
            lease,
            sender,
            interval_s=settings.webhook_interval_s,
            retry_s=settings.webhook_retry_s,
            give_up_s=settings.webhook_give_up_s,
            keep_days=settings.keep_deliveries_days,
        ),
        uploads_,
        Verifications(lambda: hub.is_closed),
    )
