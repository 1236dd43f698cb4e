"""Jobs on storage: finds and reads them without a database."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fsspec

from moe.records import StoredCheckpoint
from moe.spec import JobSpec
from moe.storage.folder import Folder
from service.control.jobs.earlier_releases import read_stored_spec
from service.control.jobs.results import read_result
from service.control.jobs.roots import StorageRoots
from service.control.report.checkpoints import list_checkpoints
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result

SPEC = "spec.json"
MAX_SPEC_BYTES = 1 << 24
MAX_DEPTH = 8
"""Most folders between a storage root and a job's folder."""
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
    for root in roots.places():
        files: Any
        files, path = fsspec.core.url_to_fs(root)
        if "://" not in root:
            yield from _below(path, 0, skip)
        elif files.exists(path):
            for storage in _below_remote(files, path.rstrip("/"), 0, skip):
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


def _below(folder: str, depth: int, skip: Callable[[str, OSError], None]) -> Iterator[str]:
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
        elif depth < MAX_DEPTH:
            yield from _below(path, depth + 1, skip)


def _below_remote(files: Any, folder: str, depth: int, skip: Callable[[str, OSError], None]) -> Iterator[str]:
    try:
        entries = files.ls(folder, detail=True)
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
            if files.exists(f"{path}/{SPEC}"):
                yield path
        elif depth < MAX_DEPTH:
            yield from _below_remote(files, path, depth + 1, skip)


def _created_at(folder: Folder) -> datetime:
    """Time of the job's POST: its spec's modification time."""
    with suppress(OSError, NotImplementedError, KeyError):
        at: datetime = folder.files.modified(folder.path_of(SPEC))
        return at if at.tzinfo else at.replace(tzinfo=UTC)
    return datetime.now(UTC)
