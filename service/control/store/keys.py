"""Keys that all control planes on one database share."""

import secrets
from contextlib import suppress

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from service.control.store import tables
from service.control.store.database import Database, WriteConflict

ROW_VERSION = 1
ATTEMPTS = "attempts"
"""Key from which the tokens of attempts are derived."""


def shared_key(database: Database, name: str, first: bytes | None = None) -> bytes:
    """Key of this name; if there is none yet, `first` or a new one of 256 random bits is stored."""
    column = tables.keys.c
    query = select(column.value).where(column.name == name)
    with database.read() as tx:
        value = tx.execute(query).scalar_one_or_none()
    if value is None:
        values = {"name": name, "version": ROW_VERSION, "value": (first or secrets.token_bytes(32)).hex()}
        # Another control plane may store its own at the same time.
        with suppress(IntegrityError, WriteConflict), database.write() as tx:
            tx.execute(insert(tables.keys).values(values))
        with database.read() as tx:
            value = tx.execute(query).scalar_one()
    return bytes.fromhex(value)
