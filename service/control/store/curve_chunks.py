"""Packed numbers of a job's metric events, in chunks of consecutive events: a cache that spares parsing their JSON."""

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Connection, func, insert, select

from service.control.store import tables

ROW_VERSION = 1


class CurveChunk(NamedTuple):
    """Numbers of the metric events with ids from `after_id` (exclusive) to `to_id` (inclusive)."""

    after_id: int
    to_id: int
    data: bytes


def last_chunk_end(tx: Connection, job_number: int) -> int:
    """Last event id in a chunk of the job; 0 without chunks."""
    chunk = tables.curve_chunks.c
    return tx.execute(select(func.max(chunk.to_id)).where(chunk.job_number == job_number)).scalar_one() or 0


def chunks_after(tx: Connection, job_number: int, after_id: int) -> Iterator[CurveChunk]:
    """Chunks that begin at or after an event, in order, read one at a time."""
    chunk = tables.curve_chunks.c
    conditions = (chunk.job_number == job_number, chunk.after_id >= after_id, chunk.version == ROW_VERSION)
    query = select(chunk.after_id, chunk.to_id, chunk.data).where(*conditions).order_by(chunk.after_id)
    with tx.execute(query, execution_options={"yield_per": 1}) as rows:
        for row in rows:
            yield CurveChunk(*row)


def insert_chunk(tx: Connection, job_number: int, chunk: CurveChunk) -> None:
    """Store a chunk, unless the job is gone, or a chunk of these events is stored."""
    job = tables.jobs.c
    lock = select(job.number).where(job.number == job_number).with_for_update()
    if tx.execute(lock).scalar_one_or_none() is not None and last_chunk_end(tx, job_number) == chunk.after_id:
        tx.execute(insert(tables.curve_chunks).values(job_number=job_number, version=ROW_VERSION, **chunk._asdict()))
