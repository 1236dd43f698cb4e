"""Drafts: folders being filled for jobs that are not stored yet."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class Draft:
    job_id: str
    storage: str
    num_parents: int
    """Folders above the draft's that are removed with it once empty."""


_COLUMNS = (tables.drafts.c.job_id, tables.drafts.c.storage, tables.drafts.c.num_parents)


def insert_draft(tx: Connection, draft: Draft, time_us: int) -> None:
    values = {"job_id": draft.job_id, "storage": draft.storage, "num_parents": draft.num_parents}
    tx.execute(insert(tables.drafts).values(version=ROW_VERSION, created_at=time_us, **values))


def note_parents(tx: Connection, job_id: str, num_parents: int) -> None:
    """Note that at least `num_parents` folders are created for a draft."""
    column = tables.drafts.c
    conditions = (column.job_id == job_id, column.num_parents < num_parents)
    tx.execute(update(tables.drafts).where(*conditions).values(num_parents=num_parents))


def finish_draft(tx: Connection, job_id: str) -> bool:
    """Delete the draft of a stored job or removed folder. False if it was no draft any more: its folder may be gone."""
    return tx.execute(delete(tables.drafts).where(tables.drafts.c.job_id == job_id)).rowcount == 1


def drop_draft(tx: Connection, draft: Draft) -> bool:
    """Delete a draft with removed folders; False if more have been noted since."""
    column = tables.drafts.c
    conditions = (column.job_id == draft.job_id, column.num_parents <= draft.num_parents)
    tx.execute(delete(tables.drafts).where(*conditions))
    return find_draft(tx, draft.job_id) is None


def find_draft(tx: Connection, job_id: str) -> Draft | None:
    row = tx.execute(select(*_COLUMNS).where(tables.drafts.c.job_id == job_id)).one_or_none()
    return None if row is None else Draft(*row)


def all_drafts(tx: Connection) -> list[Draft]:
    """Drafts of all POST requests in progress or interrupted."""
    return [Draft(*row) for row in tx.execute(select(*_COLUMNS))]


def oldest_draft(tx: Connection, before: int, excluded: Collection[str] = ()) -> Draft | None:
    """The oldest draft begun before a time, except those `excluded`."""
    column = tables.drafts.c
    query = select(*_COLUMNS).where(column.created_at < before, column.job_id.not_in(excluded))
    row = tx.execute(query.order_by(column.created_at).limit(1)).first()
    return None if row is None else Draft(*row)
