"""Jobs on storage: finds and reads them without a database."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fsspec
import structlog
from pydantic import ValidationError
from sqlalchemy import Connection

from moe.records import StoredCheckpoint
from moe.spec import JobSpec
from moe.storage.folder import FileTooLarge, Folder
from moe.storage.store_errors import in_words
from service.control.errors import Gone, NotFound, ServiceError
from service.control.jobs.earlier_releases import read_stored_spec
from service.control.jobs.roots import UPLOADS, StorageRoots
from service.control.report.checkpoints import list_checkpoints
from service.control.report.event_text import time_text
from service.control.store.deletions import DeletionRow, find_deletion
from service.control.store.jobs import JobRow, get_job
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result
from service.wire.states import State

SPEC = "spec.json"
MAX_SPEC_BYTES = 1 << 24
MAX_DEPTH = 8
"""Maximum number of folders between a storage root and a job's folder."""
_JOB_ID = re.compile(r"job-[a-z2-7]{12}")


@dataclass(frozen=True)
class StoredJob:
    """Contents of a job's storage, except its records."""

    id: str
    storage: str
    spec: JobSpec
    spec_text: str
    created_at: datetime
    attempt: int
    """Newest attempt; 0 if none was launched."""
    launch: Launch | None
    """Launch of that attempt, if readable."""
    result: Result | None
    checkpoint: StoredCheckpoint | None
    """Newest committed checkpoint."""


def job_folders(roots: StorageRoots, skip: Callable[[str, OSError], None] = lambda *_: None) -> Iterator[str]:
    """URL of each job's folder below the roots. Raises OSError for an unreadable root; unreadable folders below,
    such as `lost+found`, are passed to `skip`."""
    for root in roots.locations():
        files: Any
        files, path = fsspec.core.url_to_fs(root)
        if "://" not in root:
            yield from _job_folders_below(path, 0, skip)
        else:
            for storage in _below_remote(files, path.rstrip("/"), root, 0, skip):
                yield f"{root.partition('://')[0]}://{storage.lstrip('/')}"


def read_stored_job(roots: StorageRoots, storage: str) -> StoredJob:
    """Read a job's folder. Raises OSError, and ValueError for an unreadable spec."""
    folder = roots.folder(storage)
    spec_text = folder.read(SPEC, max_bytes=MAX_SPEC_BYTES).decode()
    spec = read_stored_spec(spec_text)
    names = folder.names("attempts")
    attempt = max((int(name) for name in names if re.fullmatch(r"[1-9]\d{0,5}", name)), default=0)
    launch = result = None
    if attempt:
        launches = AttemptFolder(storage, attempt).launches()
        launch = min(launches, key=lambda launch: launch.max_failures, default=None)
        result = read_result(folder, attempt)
    checkpoints = [checkpoint for checkpoint in list_checkpoints(folder) if not checkpoint.fault]
    return StoredJob(
        id=storage.rpartition("/")[2],
        storage=storage,
        spec=spec,
        spec_text=spec.model_dump_json(),
        created_at=_created_at(folder),
        attempt=attempt,
        launch=launch,
        result=result,
        checkpoint=checkpoints[-1] if checkpoints else None,
    )


def _job_folders_below(folder: str, depth: int, skip: Callable[[str, OSError], None]) -> Iterator[str]:
    """Job folders below a local folder; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    except OSError as error:
        if depth == 0:
            raise
        skip(folder, error)
        return
    for path in folders:
        if _JOB_ID.fullmatch(os.path.basename(path)):
            if os.path.isfile(os.path.join(path, SPEC)):
                yield path
        elif depth < MAX_DEPTH and (depth or os.path.basename(path) != UPLOADS):
            yield from _job_folders_below(path, depth + 1, skip)


def _below_remote(
    files: Any, folder: str, root: str, depth: int, skip: Callable[[str, OSError], None]
) -> Iterator[str]:
    try:
        with in_words(root):
            files.invalidate_cache()
            entries = files.ls(folder, detail=True)
    except FileNotFoundError:  # nothing has been written there
        return
    except OSError as error:
        if depth == 0:
            raise
        skip(folder, error)
        return
    for entry in entries:
        path = entry["name"].rstrip("/")
        if entry["type"] != "directory" or path.strip("/") == folder.strip("/"):
            continue
        if _JOB_ID.fullmatch(path.rpartition("/")[2]):
            if _has_spec(files, path, root):
                yield path
        elif depth < MAX_DEPTH and (depth or path.rpartition("/")[2] != UPLOADS):
            yield from _below_remote(files, path, root, depth + 1, skip)


def _has_spec(files: Any, path: str, root: str) -> bool:
    try:
        with in_words(root):
            files.info(f"{path}/{SPEC}")  # unlike `exists`, it tells a missing file from an error
    except FileNotFoundError:
        return False
    return True


def _created_at(folder: Folder) -> datetime:
    """Time of the job's POST: its spec's modification time."""
    with suppress(OSError, NotImplementedError, KeyError):
        modified_at: datetime = folder.files.modified(folder.path_of(SPEC))
        return modified_at if modified_at.tzinfo else modified_at.replace(tzinfo=UTC)
    return datetime.now(UTC)


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
    return NotFound(f"there is no job {job_id}") if deletion is None else Gone(describe_deletion(deletion))


def describe_deletion(deletion: DeletionRow) -> str:
    deleted_at = deletion.finished_at or deletion.requested_at
    return f"{deletion.job_id} was deleted by {deletion.actor} at {time_text(deleted_at)}"


MAX_BYTES = 1 << 24
"""Largest result: many times a report on a thousand languages."""
log = structlog.get_logger(__name__)


def read_result(storage: Folder, attempt: int) -> Result | None:
    """The driver's result; None without one. Raises OSError when storage cannot be read."""
    try:
        text = storage.read(f"attempts/{attempt}/result.json", max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return None
    except FileTooLarge as error:
        log.warning("ignored an unreadable result", storage=storage.url, error=str(error))
        return None
    try:
        return Result.model_validate_json(text)
    except ValidationError:
        return None  # results are written atomically, so no driver wrote this
