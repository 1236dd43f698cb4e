"""Jobs as their storage has them: found below the storage roots, and read without a database."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fsspec

from moe.records import StoredCheckpoint
from moe.spec import JobSpec
from moe.storage.folder import Folder
from service.control.lifecycle.results import read_result
from service.control.lifecycle.roots import StorageRoots
from service.control.lifecycle.stored import read_stored_spec
from service.control.report.checkpoints import list_checkpoints
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch, Result

SPEC = "spec.json"
MAX_SPEC_BYTES = 1 << 24
MAX_DEPTH = 8
"""Folders between a storage root and a job's own, which jobs name by their `storage`."""
_JOB_ID = re.compile(r"job-[a-z2-7]{12}")


@dataclass(frozen=True)
class StoredJob:
    """All that storage says of a job, but its records."""

    id: str
    storage: str
    spec: JobSpec
    spec_text: str
    created_at: datetime
    attempt: int
    """The newest; 0 where none was launched."""
    launch: Launch | None
    """Of that attempt, where it can be read."""
    result: Result | None
    checkpoint: StoredCheckpoint | None
    """The newest that is committed."""


def job_folders(roots: StorageRoots) -> Iterator[str]:
    """The folder of each job below a root, by its URL. Raises OSError where a root cannot be read."""
    for root in roots.places():
        files: Any
        files, path = fsspec.core.url_to_fs(root)
        if "://" not in root:
            yield from _below(path, 0)
        elif files.exists(path):
            for storage in _below_remote(files, path.rstrip("/"), 0):
                yield f"{root.partition('://')[0]}://{storage.lstrip('/')}"


def read_stored_job(roots: StorageRoots, storage: str) -> StoredJob:
    """Read a job's folder. Raises OSError, and ValueError for a spec that this release cannot read."""
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
    whole = [checkpoint for checkpoint in list_checkpoints(folder) if not checkpoint.fault]
    return StoredJob(
        id=storage.rpartition("/")[2],
        storage=storage,
        spec=spec,
        spec_text=spec.model_dump_json(),
        created_at=_made_at(folder),
        attempt=attempt,
        launch=launch,
        result=result,
        checkpoint=whole[-1] if whole else None,
    )


def _below(folder: str, depth: int) -> Iterator[str]:
    """Follows no link."""
    try:
        with os.scandir(folder) as entries:
            folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    for path in folders:
        if _JOB_ID.fullmatch(os.path.basename(path)):
            if os.path.isfile(os.path.join(path, SPEC)):
                yield path
        elif depth < MAX_DEPTH:
            yield from _below(path, depth + 1)


def _below_remote(files: Any, folder: str, depth: int) -> Iterator[str]:
    for entry in files.ls(folder, detail=True):
        path = entry["name"].rstrip("/")
        if entry["type"] != "directory" or path.strip("/") == folder.strip("/"):
            continue
        if _JOB_ID.fullmatch(path.rpartition("/")[2]):
            if files.exists(f"{path}/{SPEC}"):
                yield path
        elif depth < MAX_DEPTH:
            yield from _below_remote(files, path, depth + 1)


def _made_at(folder: Folder) -> datetime:
    """When the job was posted: its spec is written then, and never again."""
    with suppress(OSError, NotImplementedError, KeyError):
        at: datetime = folder.files.modified(folder.path_of(SPEC))
        return at if at.tzinfo else at.replace(tzinfo=UTC)
    return datetime.now(UTC)
