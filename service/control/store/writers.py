"""Sequence number of each writer of an attempt, which prevents duplicate records."""

from sqlalchemy import ColumnElement, Connection, insert, select, update

from service.control.store import tables

ROW_VERSION = 1


def next_seq(tx: Connection, job_number: int, attempt: int, writer: str) -> int:
    """Sequence number of the writer's next record; 0 for an unknown writer."""
    result = tx.execute(select(tables.writers.c.next_seq).where(*_key(job_number, attempt, writer)))
    return result.scalar_one_or_none() or 0


def newest_group(tx: Connection, job_number: int) -> tuple[int, int]:
    """(attempt, group) of the newest worker group with a stored record, or (0, 0)."""
    column = tables.writers.c
    conditions = (column.job_number == job_number, column.group.is_not(None), column.next_seq > 0)
    order = (column.attempt.desc(), column.group.desc())
    newest = tx.execute(select(column.attempt, column.group).where(*conditions).order_by(*order).limit(1)).first()
    return (newest[0], newest[1]) if newest is not None else (0, 0)


def advance(tx: Connection, job_number: int, attempt: int, writer: str, group: int | None, next_seq: int) -> None:
    result = tx.execute(update(tables.writers).where(*_key(job_number, attempt, writer)).values(next_seq=next_seq))
    if result.rowcount == 0:
        tx.execute(
            insert(tables.writers).values(
                job_number=job_number,
                attempt=attempt,
                writer=writer,
                version=ROW_VERSION,
                group=group,
                next_seq=next_seq,
            )
        )


def _key(job_number: int, attempt: int, writer: str) -> tuple[ColumnElement[bool], ...]:
    column = tables.writers.c
    return (column.job_number == job_number, column.attempt == attempt, column.writer == writer)
