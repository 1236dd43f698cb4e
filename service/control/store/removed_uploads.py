"""Uploads that were removed. Their files are in the storage, but a job and a removal exclude each other here."""

from sqlalchemy import Connection, delete, func, insert, select

from service.control.store import tables

ROW_VERSION = 1
_LOCK = 0x75706C6F616473
"""Key of PostgreSQL's advisory lock."""


def lock_uploads(tx: Connection) -> None:
    """Exclude other transactions that take this lock, until this one ends. SQLite has one writer at a time anyway."""
    if tx.dialect.name == "postgresql":
        tx.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def removed_uploads(tx: Connection) -> dict[str, int]:
    """Time of removal, by digest."""
    column = tables.removed_uploads.c
    return {row.digest: row.removed_at for row in tx.execute(select(column.digest, column.removed_at))}


def insert_removed_upload(tx: Connection, digest: str, removed_at: int) -> None:
    """Note a removal, in place of an earlier one."""
    delete_removed_upload(tx, digest)
    row = {"digest": digest, "version": ROW_VERSION, "removed_at": removed_at}
    tx.execute(insert(tables.removed_uploads).values(**row))


def delete_removed_upload(tx: Connection, digest: str) -> None:
    tx.execute(delete(tables.removed_uploads).where(tables.removed_uploads.c.digest == digest))
