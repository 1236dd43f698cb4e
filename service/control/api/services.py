"""Services that routes get by dependency injection."""

import re
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Path, Request

from service.control.errors import NotFound
from service.control.generation.generations import Generations
from service.control.jobs.roots import StorageRoots
from service.control.jobs.stored_jobs import find_job
from service.control.report.curve_store import CurveStore
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.prometheus import Figures
from service.control.report.streams import EventStreams
from service.control.report.verification import Verifications
from service.control.retention.deletions import Deletions
from service.control.scheduling.cluster_watch import ClusterWatch
from service.control.scheduling.controller import Controller
from service.control.scheduling.module_plans import ModulePlans
from service.control.scheduling.recovery import Recovery
from service.control.scheduling.requests import Requests
from service.control.store.database import Database
from service.control.store.jobs import JobReference, JobRow
from service.control.sweeps.requests import SweepRequests
from service.control.tracking.tracking import Tracking
from service.control.uploads.uploads import Uploads
from service.control.webhooks.deliveries import Deliveries
from service.control.webhooks.webhooks import Webhooks
from service.settings import Settings

_JOB_ID = re.compile(r"job-[a-z2-7]{12}")


@dataclass(frozen=True)
class Services:
    settings: Settings
    database: Database
    hub: Hub
    streams: EventStreams
    ingest: Ingest
    requests: Requests
    sweeps: SweepRequests
    deletions: Deletions
    storage_roots: StorageRoots
    watch: ClusterWatch
    controller: Controller
    figures: Figures
    modules: ModulePlans
    generations: Generations
    recovery: Recovery
    tracking: Tracking
    curves: CurveStore
    webhooks: Webhooks
    deliveries: Deliveries
    uploads: Uploads
    verifications: Verifications


# These two are coroutines because they do not block: FastAPI runs plain functions in a thread.
async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDependency = Annotated[Services, Depends(_services)]


async def _job_id(job_id: Annotated[str, Path(description="`job-` and 12 letters and digits")]) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise NotFound("there is no such job; an id is 'job-' and 12 letters and digits")
    return job_id


JobId = Annotated[str, Depends(_job_id)]


def _job(job_id: JobId, services: ServicesDependency) -> JobRow:
    with services.database.read() as tx:
        return find_job(tx, job_id)


def _job_reference(job_id: JobId, services: ServicesDependency) -> JobReference:
    job = _job(job_id, services)
    return JobReference(job.id, job.number, job.storage, job.first_event_id)


Job = Annotated[JobRow, Depends(_job)]
"""Raises NotFound, and Gone for a job that was or is being deleted."""

Place = Annotated[JobReference, Depends(_job_reference)]
"""Reference to a job, for streams: FastAPI holds dependencies until the response ends, and this is smaller than
`Job`."""
