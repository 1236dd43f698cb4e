"""JSON views of jobs for clients."""

import json
from typing import Any

from service.control.report.event_text import time_text
from service.control.report.saves import read_saves
from service.control.store.deletions import DeletionRow
from service.control.store.jobs import JobRow, JobSummary


def summary_view(job: JobSummary) -> dict[str, Any]:
    """A job in a list."""
    return {
        "id": job.id,
        "name": job.name,
        "owner": job.owner,
        "labels": json.loads(job.labels),
        "state": job.state,
        "reason": job.reason,
        "request": job.request,
        "attempt": job.attempt,
        "created_at": time_text(job.created_at),
        "updated_at": time_text(job.updated_at),
        "started_at": _time(job.started_at),
        "finished_at": _time(job.finished_at),
        "step": job.step,
        "num_steps": job.num_steps,
        "last_event_id": job.last_event_id,
        "first_event_id": job.first_event_id,
        "dashboard_url": job.dashboard_url,
        "storage": job.storage,
    }


def job_view(job: JobRow) -> dict[str, Any]:
    """All of a job; its spec as stored, by any release."""
    return {
        **summary_view(job),
        "failures": job.failures,
        "last_metric": _json(job.last_metric),
        **read_saves(job.saves).view(),
        "result": _json(job.result),
        "spec": _json(job.spec),
    }


def deletion_view(deletion: DeletionRow, reason: str) -> dict[str, Any]:
    """A job that is being deleted, or gone."""
    return {
        "id": deletion.job_id,
        "name": deletion.name,
        "owner": deletion.owner,
        "state": "deleting" if deletion.finished_at is None else "deleted",
        "reason": reason,
        "actor": deletion.actor,
        "requested_at": time_text(deletion.requested_at),
        "finished_at": _time(deletion.finished_at),
    }


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else time_text(time_us)


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
