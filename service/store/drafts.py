"""Folders that are being filled for jobs that are not stored yet."""

from collections.abc import Collection

from sqlalchemy import Connection, delete, insert, select

from service.store import tables

ROW_VERSION = 1


def insert_draft(tx: Connection, job_id: str, storage: str, now: int) -> None:
    tx.execute(
        insert(tables.drafts).values(job_id=job_id, version=ROW_VERSION, storage=storage, created_at=now)
    )


def finish_draft(tx: Connection, job_id: str) -> bool:
    """The job is stored, or its folder gone. False where it was no draft any more: its folder may be gone."""
    return tx.execute(delete(tables.drafts).where(tables.drafts.c.job_id == job_id)).rowcount == 1


def oldest_draft(tx: Connection, before: int, without: Collection[str] = ()) -> tuple[str, str] | None:
    """(job id, storage) of the oldest that was begun before a time, if there is one beside those `without`."""
    column = tables.drafts.c
    query = select(column.job_id, column.storage).where(
        column.created_at < before, column.job_id.not_in(without)
    )
    row = tx.execute(query.order_by(column.created_at).limit(1)).first()
    return None if row is None else (row[0], row[1])
