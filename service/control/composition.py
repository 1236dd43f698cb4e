"""Composition root of the control plane: creates its services and connects them."""

import os
import secrets
import socket
from pathlib import Path

from service.control.api.services import Services
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
from service.control.tracking.tracking import Tracking
from service.control.uploads.uploads import UploadLimits, Uploads
from service.control.webhooks.addresses import AddressRule
from service.control.webhooks.deliveries import Deliveries
from service.control.webhooks.sender import Sender
from service.control.webhooks.webhooks import Webhooks
from service.settings import Settings
from service.tracker.places import TrackerPlaces
from service.wire.states import ACTIVE, OVER, State


def open_services(settings: Settings, launcher: Launcher, hub: Hub, figures: Figures) -> Services:
    """Open everything that routes and the controller use, on a migrated store."""
    _make_private_folder(settings.state_dir)
    database = Database(settings.database_url)
    database.migrate()
    lease = Lease(database, hub, _lease_holder_name(), settings.lease_s)
    mint = TokenMint.of(database, settings.state_dir)
    roots = StorageRoots(settings.storage_roots)
    uploads = Uploads(database, lease, roots, _upload_limits(settings))
    data_roots = DataRoots(settings.data_roots, uploads.url)
    watch = ClusterWatch(launcher, settings.cache_dir)
    tracker_places = _tracker_places(settings)

    def wake_controller() -> None:
        controller.wake()  # the controller needs these services, and they wake it

    modules = ModulePlans(
        settings.allowed_code, settings.planning_timeout_s, settings.planning_memory_bytes, wake=wake_controller
    )
    ingest = Ingest(database, hub, mint, on_phase=wake_controller)
    deletions = Deletions(database, hub, lease, roots, wake=wake_controller, forget=launcher.forget_job)
    starter = Starter(
        database, lease, launcher, watch, mint,
        events_url=settings.events_url, cache=str(settings.cache_dir), data_roots=data_roots,
        allowed_code=settings.allowed_code, modules=modules,
    )  # fmt: skip
    controller = Controller(
        database, lease, launcher, starter, ingest, roots, _deadlines(settings),
        chores=(
            Sweeps(database, lease, deletions).step,
            deletions.step,
            Retention(database, lease, settings.keep_jobs_days).step,
            Drafts(database, roots, settings.abandoned_after_s).step,
            uploads.step,
            SpecKeeper(database, lease, roots).step,
            Orphans(database, lease, launcher, mint.instance).step,
        ),
    )  # fmt: skip
    launcher.on_change(controller.wake)
    requests = Requests(
        database, hub, watch, roots, data_roots, controller.wake,
        allowed_code=settings.allowed_code, modules=modules, trackers=tracker_places, uploads=uploads,
    )  # fmt: skip
    recovery = Recovery(
        database, roots, launcher, ingest, settings.owner, settings.state_dir,
        recover_sweeps=SweepRecovery(database, roots, settings.owner).run,
    )  # fmt: skip
    tracking = Tracking(
        database, lease, ingest.statuses, tracker_places,
        interval_s=settings.tracking_interval_s, patience_s=settings.tracking_patience_s,
    )  # fmt: skip
    webhooks, deliveries = _open_webhooks(settings, database, lease)
    _register_job_metrics(figures, database, ingest, controller)
    return Services(
        settings=settings,
        database=database,
        hub=hub,
        streams=EventStreams(database, hub, OVER, settings.ping_interval_s),
        ingest=ingest,
        requests=requests,
        sweeps=SweepRequests(database, hub, requests, controller.wake),
        deletions=deletions,
        storage_roots=roots,
        watch=watch,
        controller=controller,
        figures=figures,
        modules=modules,
        generations=Generations(_generation_limits(settings)),
        recovery=recovery,
        tracking=tracking,
        curves=CurveStore(database),
        webhooks=webhooks,
        deliveries=deliveries,
        uploads=uploads,
        verifications=Verifications(lambda: hub.is_closed),
    )


def _make_private_folder(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)


def _lease_holder_name() -> str:
    """Name that no other control plane has, nor this one after a restart."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def _upload_limits(settings: Settings) -> UploadLimits:
    return UploadLimits(settings.max_upload_bytes, settings.max_uploads_bytes, settings.abandoned_upload_s)


def _deadlines(settings: Settings) -> Deadlines:
    return Deadlines(
        settings.cancel_deadline_s, settings.pause_deadline_s, settings.lost_grace_s, settings.grow_after_s
    )


def _generation_limits(settings: Settings) -> GenerationLimits:
    return GenerationLimits(
        settings.generation_timeout_s,
        settings.generation_load_timeout_s,
        settings.generation_idle_s,
        settings.generation_memory_bytes,
    )


def _tracker_places(settings: Settings) -> TrackerPlaces:
    return TrackerPlaces(
        str(settings.tracking_dir),
        settings.mlflow_tracking_uri,
        settings.tracking_urls,
        settings.wandb_base_url,
        settings.has_wandb_key,
    )


def _open_webhooks(settings: Settings, database: Database, lease: Lease) -> tuple[Webhooks, Deliveries]:
    """Store the operator's webhooks; return all webhooks and the deliveries to them."""
    address_rule = AddressRule(settings.webhook_networks)
    sender = Sender(address_rule, settings.webhook_timeout_s)
    webhooks = Webhooks(database, sender, address_rule)
    webhooks.set_operators(settings.webhooks, settings.owner)
    deliveries = Deliveries(
        database, lease, sender,
        interval_s=settings.webhook_interval_s, retry_s=settings.webhook_retry_s,
        give_up_s=settings.webhook_give_up_s, keep_days=settings.keep_deliveries_days,
    )  # fmt: skip
    return webhooks, deliveries


def _register_job_metrics(figures: Figures, database: Database, ingest: Ingest, controller: Controller) -> None:
    """Register the metrics that are read from the store at every scrape."""

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
        is_evaluating = ingest.statuses.is_evaluating
        return {
            job.id: ActiveJob(
                job.step,
                job.num_steps,
                read_saves(job.saves),
                is_evaluating=is_evaluating(job.id, job.attempt),
                is_queued=controller.is_queued_elsewhere(job.id, job.attempt),
            )
            for job in jobs
        }

    figures.watch_jobs(count_jobs)
    figures.watch_queue(oldest_queued_s)
    figures.watch_active(active_jobs)
