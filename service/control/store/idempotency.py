"""Idempotency keys of posted jobs: repeating a POST returns the same job."""

from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from service.control.store import tables

ROW_VERSION = 1


@dataclass(frozen=True)
class UsedKey:
    fingerprint: str
    job_number: int


def find_key(tx: Connection, owner: str, key: str) -> UsedKey | None:
    column = tables.idempotency_keys.c
    query = select(column.fingerprint, column.job_number).where(column.owner == owner, column.key == key)
    row = tx.execute(query).one_or_none()
    return None if row is None else UsedKey(row.fingerprint, row.job_number)


def use_key(tx: Connection, owner: str, key: str, fingerprint: str, job_number: int, time_us: int) -> None:
    tx.execute(
        insert(tables.idempotency_keys).values(
            owner=owner,
            key=key,
            version=ROW_VERSION,
            fingerprint=fingerprint,
            job_number=job_number,
            created_at=time_us,
        )
    )
