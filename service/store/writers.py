"""How far each writer of an attempt has come: the sequence by which nothing is stored twice."""

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from service.store import tables

ROW_VERSION = 1


def next_seq(tx: Connection, job_number: int, attempt: int, writer: str) -> int:
    """Every record below is stored; 0 for a writer that has sent none."""
    found = tx.execute(select(tables.writers.c.next_seq).where(*_key(job_number, attempt, writer)))
    return found.scalar_one_or_none() or 0


def newest_group(tx: Connection, job_number: int, attempt: int) -> int | None:
    """The highest worker group of the attempt that has sent a record of its own."""
    column = tables.writers.c
    query = select(func.max(column.group)).where(
        column.job_number == job_number, column.attempt == attempt, column.next_seq > 0
    )
    newest: int | None = tx.execute(query).scalar_one()
    return newest


def advance(
    tx: Connection, job_number: int, attempt: int, writer: str, group: int | None, next_seq: int
) -> None:
    changed = tx.execute(
        update(tables.writers).where(*_key(job_number, attempt, writer)).values(next_seq=next_seq)
    )
    if changed.rowcount == 0:
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
