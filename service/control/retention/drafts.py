"""Removes folders that a killed control plane left for jobs that it never stored. Only noted drafts are removed:
other folders may be another control plane's jobs."""

from time import monotonic

import structlog

from service.control.jobs.roots import StorageRoots
from service.control.retention.draft_folder import remove_draft
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.drafts import oldest_draft

STEP_S = 0.2
"""Time spent on files in one step."""
LOOK_S = 600.0
"""Longest interval between searches, and between attempts to remove one folder."""
log = structlog.get_logger(__name__)


class Drafts:
    """Removes drafts older than any copy can take, a little per controller step."""

    def __init__(self, database: Database, roots: StorageRoots, abandoned_after_s: float) -> None:
        self._database, self._roots = database, roots
        self._abandoned_after_us = int(abandoned_after_s * 1e6)
        self._look_s = min(LOOK_S, abandoned_after_s)  # so that a draft that is too young now is not delayed long
        self._look_at = 0.0
        self._next_try_at: dict[str, float] = {}
        """Next attempts for folders that could not be removed."""

    def step(self) -> bool:
        """Do part of the oldest draft's removal; False if none."""
        if monotonic() < self._look_at:
            return False
        self._next_try_at = {
            job_id: next_try_at for job_id, next_try_at in self._next_try_at.items() if next_try_at > monotonic()
        }
        with self._database.read() as tx:
            draft = oldest_draft(tx, now_us() - self._abandoned_after_us, self._next_try_at)
        if draft is None:
            self._look_at = monotonic() + self._look_s
            return False
        try:
            is_removed = remove_draft(self._database, self._roots, draft, monotonic() + STEP_S)
        except Exception as error:  # from any storage backend
            log.warning(
                "cannot remove the folder of a job that was never stored", storage=draft.storage, error=str(error)
            )
            self._next_try_at[draft.job_id] = monotonic() + LOOK_S
            return True
        if is_removed:
            log.info("removed the folder of a job that was never stored", storage=draft.storage)
        return True
