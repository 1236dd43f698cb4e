"""Folder of a job that is not stored yet, and the parents created for it. They are recorded before they are created,
and removed if the job is refused."""

import errno
import math
import os

import structlog

from service.control.jobs.roots import StorageRoots
from service.control.retention.removal import remove_job_folder, remove_parents
from service.control.store.database import Database
from service.control.store.drafts import Draft, all_drafts, drop_draft, find_draft, insert_draft, note_parents
from service.control.store.jobs import get_job

_IMPOSSIBLE_PATH = (errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors for paths at which no file can exist."""
log = structlog.get_logger(__name__)


class DraftFolder:
    """Folder of a job that is being submitted."""

    def __init__(self, database: Database, roots: StorageRoots, job_id: str, storage: str) -> None:
        self._database, self._roots = database, roots
        self._draft = Draft(job_id, storage, 0)
        self._exists = False

    def note(self, time_us: int) -> None:
        """Store that the folder will be created, and which parents with it, so that a cleanup finds them after a crash.

        Existing parents created for another draft also count as this one's: the last to go removes them. Drafts that
        have noted parents are seen here; later ones hand them over when they are removed.
        """
        draft = self._draft
        with self._database.write() as tx:
            insert_draft(tx, draft, time_us)
            claimed_paths = {path for other_draft in all_drafts(tx) for path in _created_parents(other_draft)}
        parents = _parent_folders(self._roots, draft.storage)
        claimed_paths.update(path for path in parents if not os.path.lexists(path))
        if num_parents := next((n for n, path in enumerate(parents) if path not in claimed_paths), len(parents)):
            with self._database.write() as tx:
                note_parents(tx, draft.job_id, num_parents)

    def mark_created(self) -> None:
        """Note that the folder exists now."""
        self._exists = True

    def give_up(self) -> None:
        """Remove what was created, or leave it to the cleanup if that fails or the job may be stored."""
        draft, is_removed = self._draft, False
        try:
            while not is_removed:
                with self._database.read() as tx:
                    if get_job(tx, draft.job_id) is not None:
                        return
                    draft = find_draft(tx, draft.job_id) or draft
                is_removed = remove_draft(self._database, self._roots, draft, math.inf, was_created=self._exists)
        except Exception as error:  # from any storage backend; must not replace the original error
            log.warning(
                "the folder of a refused job remains until the cleanup", storage=draft.storage, error=str(error)
            )


def remove_draft(
    database: Database, roots: StorageRoots, draft: Draft, until: float, *, was_created: bool = True
) -> bool:
    """Remove a draft's folder as `remove_job_folder` does, then the parents created for it, then its row; returns
    whether all is done. Non-empty parents are handed over to the drafts inside them."""
    if was_created:
        try:
            if not remove_job_folder(roots, draft.storage, until):
                return False
        except OSError as error:
            if error.errno not in _IMPOSSIBLE_PATH:
                raise
    if parent_paths := _created_parents(draft):
        with database.write() as tx:
            for other_draft in all_drafts(tx):
                depths = [depth for depth, path in enumerate(_parents(other_draft.storage), 1) if path in parent_paths]
                note_parents(tx, other_draft.job_id, max(depths, default=0))
    remove_parents(roots, draft.storage, draft.num_parents)
    with database.write() as tx:
        return drop_draft(tx, draft)


def _parent_folders(roots: StorageRoots, storage: str) -> list[str]:
    """Folders between a job's and its root, deepest first; none for object stores."""
    root, *parents, _ = roots.find(storage) or ("://", "")
    if "://" in root:
        return []
    return [os.path.join(root, *parents[:depth]) for depth in range(len(parents), 0, -1)]


def _parents(storage: str) -> list[str]:
    """All folders above a job's, deepest first."""
    return [storage.rsplit("/", depth)[0] for depth in range(1, storage.count("/") + 1)]


def _created_parents(draft: Draft) -> list[str]:
    return _parents(draft.storage)[: draft.num_parents]
