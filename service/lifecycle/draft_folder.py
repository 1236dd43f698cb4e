"""The folder of a job that is not stored yet, and those above it that are made for it: noted before they are made, and
removed where the job is refused."""

import errno
import math
import os

import structlog

from service.lifecycle.removal import remove_job_folder, remove_parents
from service.lifecycle.roots import StorageRoots
from service.store.database import Database
from service.store.drafts import Draft, all_drafts, finish_draft, insert_draft, note_parents
from service.store.jobs import get_job

_NO_PLACE = (errno.ENOTDIR, errno.ENAMETOOLONG)
"""Of paths that nothing can lie at."""
log = structlog.get_logger(__name__)


class DraftFolder:
    """A job's folder while its job is being submitted."""

    def __init__(self, database: Database, roots: StorageRoots, job_id: str, storage: str) -> None:
        self._database, self._roots = database, roots
        self._draft = Draft(job_id, storage, 0)
        self._made = False

    def note(self, now: int) -> None:
        """Stores that the folder is about to be made, and which above it are: whatever dies from here on, a sweep finds
        them.

        Those that are there and were made for another draft count as made for this one, too: whoever goes last removes
        them. Such a draft is seen before or after they are looked for, since its note goes after they have gone.
        """
        draft = self._draft
        with self._database.write() as tx:
            insert_draft(tx, draft, now)
            claimed = _parents_of(all_drafts(tx))
        above = _above(self._roots, draft.storage)
        if not above:
            return
        missing = _missing(above)
        while missing - claimed or self._draft is draft:
            with self._database.write() as tx:
                claimed |= missing | _parents_of(all_drafts(tx))
                num_parents = next((n for n, path in enumerate(above) if path not in claimed), len(above))
                note_parents(tx, draft.job_id, num_parents)
            self._draft = Draft(draft.job_id, draft.storage, num_parents)
            missing = _missing(above)  # what another POST made may have come and gone, and its note with it

    def made(self) -> None:
        """To be called when the folder is there."""
        self._made = True

    def give_up(self) -> None:
        """Removes what was made. Where that cannot be told, or done, it is left to the sweep: a store whose answer was
        lost may have the job."""
        draft = self._draft
        try:
            with self._database.read() as tx:
                if get_job(tx, draft.job_id) is not None:
                    return
            remove_draft(self._roots, draft, math.inf, was_made=self._made)
            with self._database.write() as tx:
                finish_draft(tx, draft.job_id)
        except Exception as error:  # of any kind of storage; the answer that this stands beside matters more
            log.warning(
                "the folder of a job that was refused stays until the sweep",
                storage=draft.storage,
                error=str(error),
            )


def remove_draft(roots: StorageRoots, draft: Draft, until: float, *, was_made: bool = True) -> bool:
    """Removes a draft's folder, as `remove_job_folder` does, and then those above it that were made for it."""
    if was_made:
        try:
            if not remove_job_folder(roots, draft.storage, until):
                return False
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
    remove_parents(roots, draft.storage, draft.num_parents)
    return True


def _above(roots: StorageRoots, storage: str) -> list[str]:
    """Folders between a job's own and its root, the deepest first; object stores have none."""
    root, *parents, _ = roots.find(storage) or ("://", "")
    if "://" in root:
        return []
    return [os.path.join(root, *parents[:depth]) for depth in range(len(parents), 0, -1)]


def _missing(paths: list[str]) -> set[str]:
    return {path for path in paths if not os.path.lexists(path)}


def _parents_of(drafts: list[Draft]) -> set[str]:
    return {
        draft.storage.rsplit("/", depth)[0] for draft in drafts for depth in range(1, draft.num_parents + 1)
    }
