"""Removal of a job's folder in small steps, and of nothing outside it.

Every descent uses the parent's file descriptor and follows no symbolic link, so that entries swapped for links
meanwhile are harmless.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import fsspec

from moe.storage import confined
from moe.storage.store_errors import in_words
from moe.train.checkpoint import marker as markers
from service.control.jobs.roots import StorageRoots
from service.wire.node_folder import spool_bases

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def remove_job_folder(roots: StorageRoots, storage: str, until: float) -> bool:
    """Remove files of `storage`, at least one, until the monotonic clock reaches `until`. Returns whether the folder is
    gone. Checkpoint markers are removed first, so that a partly removed checkpoint never looks complete. Raises OSError
    if something cannot be removed, or if the folder or one of its parents below the root is a symbolic link."""
    location = roots.find(storage)
    if location is None:
        raise OSError(
            f"its storage {storage} is outside the storage roots of this service; its operator can "
            "add the root to SHARDYARD_STORAGE_ROOTS again"
        )
    root, *parents, name = location
    if "://" in root:
        with in_words(storage):
            return _remove_remote(storage, until)
    if not os.path.isdir(root):  # an unmounted share still has the files
        raise OSError(f"the storage root {root} is missing; mount or recreate it")
    with suppress(FileNotFoundError), _open_folder(root, *parents) as parent, _opened_below(parent, name) as folder:
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            confined.open_folder(folder, markers.FOLDER) as checkpoints,
        ):
            for marker, is_folder in confined.entries_of(checkpoints):
                if marker.endswith(markers.SUFFIX) and not is_folder:
                    os.unlink(marker, dir_fd=checkpoints)
        if not confined.remove_entries(folder, until):
            return False
        os.rmdir(name, dir_fd=parent)
    return True


def remove_parents(roots: StorageRoots, storage: str, num_parents: int) -> None:
    """Remove up to `num_parents` empty folders directly above a job's."""
    root, *parents, _ = roots.find(storage) or ("://", "")
    for _ in range(num_parents):
        name = parents.pop()
        with suppress(OSError), _open_folder(root, *parents) as parent:  # it may not exist
            os.rmdir(name, dir_fd=parent)


def remove_spool(job_id: str, until: float) -> bool:
    """Remove the files of a job's killed processes from this machine's spool."""
    return all(_remove_from_spool(base, job_id, until) for base in spool_bases())


def _remove_from_spool(base: Path, job_id: str, until: float) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        if base.lstat().st_uid != os.getuid():
            return True
        with _open_folder(str(base)) as parent, _opened_below(parent, job_id) as folder:
            if not confined.remove_entries(folder, until):
                return False
            os.rmdir(job_id, dir_fd=parent)
    return True


@contextmanager
def _open_folder(root: str, *names: str) -> Iterator[int]:
    """File descriptor of a folder. Links are followed in the operator's root only."""
    with ExitStack() as handles:
        handle = os.open(root, _ROOT)
        handles.callback(os.close, handle)
        for name in names:
            handle = handles.enter_context(_opened_below(handle, name))
        yield handle


@contextmanager
def _opened_below(parent: int, name: str) -> Iterator[int]:
    if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise OSError(f"{name!r} is a symbolic link, which is not followed; remove the link and its target")
    with confined.open_folder(parent, name) as handle:
        yield handle


def _remove_remote(storage: str, until: float) -> bool:
    files: Any
    files, path = fsspec.core.url_to_fs(storage)
    files.invalidate_cache()
    for entry in _list(files, f"{path}/{markers.FOLDER}"):
        if entry["name"].endswith(markers.SUFFIX):
            files.rm_file(entry["name"])
    return _empty_remote(files, path.rstrip("/"), until)


def _empty_remote(files: Any, path: str, until: float) -> bool:
    for entry in _list(files, path):
        name = entry["name"].rstrip("/")
        if entry["type"] == "directory":
            if not _empty_remote(files, name, until):
                return False
        else:
            files.rm_file(entry["name"])
        if monotonic() > until:
            return False
    with suppress(OSError, NotImplementedError):  # object stores have no folders
        files.rmdir(path)
    return True


def _list(files: Any, path: str) -> list[dict[str, Any]]:
    """Entries directly below: some stores also list the folder itself."""
    try:
        entries = files.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [entry for entry in entries if entry["name"].strip("/").startswith(path.strip("/") + "/")]
