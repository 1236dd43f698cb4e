"""Looks up a job for a request, with the same errors everywhere."""

from sqlalchemy import Connection

from service.control.errors import Gone, NotFound, ServiceError
from service.control.report.event_text import time_text
from service.control.store.deletions import DeletionRow, find_deletion
from service.control.store.jobs import JobRow, get_job
from service.wire.states import State


def find_job(tx: Connection, job_id: str, *, lock: bool = False) -> JobRow:
    """The job with this id. Raises NotFound, and Gone for one that was or is being deleted."""
    job = get_job(tx, job_id, lock=lock)
    if job is None:
        raise absence(tx, job_id)
    if job.state == State.DELETING:
        raise Gone(f"{job_id} is being deleted: {job.reason}")
    return job


def absence(tx: Connection, job_id: str) -> ServiceError:
    """NotFound or Gone, for a job that is not stored."""
    deletion = find_deletion(tx, job_id=job_id)
    return NotFound(f"there is no job {job_id}") if deletion is None else Gone(deleted_in_words(deletion))


def deleted_in_words(deletion: DeletionRow) -> str:
    at = deletion.finished_at or deletion.requested_at
    return f"{deletion.job_id} was deleted by {deletion.actor} at {time_text(at)}"
