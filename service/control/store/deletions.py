"""Records of deleted jobs: who requested the deletion, and when."""

from dataclasses import dataclass, fields

from sqlalchemy import Connection, insert, select, update

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class DeletionRow:
    job_id: str
    job_number: int
    owner: str
    name: str
    storage: str
    attempts: int
    """Number of attempts: their tokens are still recognized, and refused."""
    actor: str
    requested_at: int
    finished_at: int | None
    """None while files or rows of the job remain."""


_DELETION = [tables.deletions.c[field.name] for field in fields(DeletionRow)]


def insert_deletion(tx: Connection, row: DeletionRow) -> None:
    tx.execute(insert(tables.deletions).values(version=ROW_VERSION, **vars(row)))


def find_deletion(tx: Connection, *, job_id: str | None = None, job_number: int | None = None) -> DeletionRow | None:
    """Deletion of a job, by its id or number."""
    column = tables.deletions.c
    condition = column.job_id == job_id if job_id is not None else column.job_number == job_number
    row = tx.execute(select(*_DELETION).where(condition)).one_or_none()
    return None if row is None else DeletionRow(*row)


def finish_deletion(tx: Connection, job_id: str, time_us: int) -> None:
    column = tables.deletions.c
    tx.execute(update(tables.deletions).where(column.job_id == job_id).values(finished_at=time_us))
