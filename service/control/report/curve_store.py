"""Curves read from the store: from packed chunks of events, and from the newest events themselves.

Parsing the records of 100,000 steps takes more than a second, for which a user would wait after every start of the
control plane. Therefore events are packed as they arrive, in chunks that are never rewritten.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from service.control.errors import Full, Unavailable
from service.control.report.curves import JobCurves
from service.control.store.curve_chunks import CurveChunk, chunks_after, insert_chunk, last_chunk_end
from service.control.store.database import Database
from service.control.store.events import last_event_id, metric_rows

MAX_JOBS = 32
"""Maximum number of jobs whose columns stay in memory; the least recently read are dropped."""
MAX_BYTES = 1 << 29
"""Maximum memory of the columns that stay, unless the last job read has more."""
CHUNK_EVENTS = 5_000
"""Events of a chunk."""
log = structlog.get_logger(__name__)


class CurveStore:
    """Columns of the most recently read jobs. Thread-safe."""

    def __init__(self, database: Database, max_bytes: int = MAX_BYTES) -> None:
        self._database, self._max_bytes = database, max_bytes
        self._jobs: OrderedDict[int, JobCurves] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, job_number: int) -> "LockedCurves":
        """Context manager: the job's columns with all records stored so far, for this thread alone."""
        with self._lock:
            curves = self._jobs.setdefault(job_number, JobCurves())
            self._jobs.move_to_end(job_number)
            num_bytes = sum(job_curves.num_bytes for job_curves in self._jobs.values())
            while len(self._jobs) > 1 and (len(self._jobs) > MAX_JOBS or num_bytes > self._max_bytes):
                _, dropped = self._jobs.popitem(last=False)
                num_bytes -= dropped.num_bytes
        return LockedCurves(self._database, job_number, curves)


@dataclass(frozen=True)
class LockedCurves:
    """Context manager of `CurveStore.read`."""

    database: Database
    job_number: int
    curves: JobCurves

    def __enter__(self) -> JobCurves:
        self.curves.lock.acquire()
        try:
            self._catch_up()
        except BaseException:
            self.curves.lock.release()
            raise
        return self.curves

    def __exit__(self, *_: object) -> None:
        self.curves.lock.release()

    def _catch_up(self) -> None:
        with self.database.read() as tx:
            if last_event_id(tx, self.job_number) <= self.curves.read_to:
                return
        if not self.curves.read_to:
            pack_chunks(self.database, self.job_number)
        with self.database.read() as tx:
            end = last_event_id(tx, self.job_number)
            for chunk in chunks_after(tx, self.job_number, self.curves.read_to):
                if chunk.after_id != self.curves.read_to:
                    break  # the columns end within it
                self.curves.extend_packed(chunk.data)
                self.curves.read_to = chunk.to_id
            for rows in metric_rows(tx, self.job_number, self.curves.read_to, end):
                self.curves.extend(rows)
                self.curves.read_to = rows[-1].id
        self.curves.read_to = end


def pack_chunks(database: Database, job_number: int) -> None:
    """Pack the events of a job that fill complete chunks. A store that cannot be written is not an error: events that
    are not packed will be parsed."""
    try:
        while (chunk := _next_chunk(database, job_number)) is not None:
            with database.write() as tx:
                insert_chunk(tx, job_number, chunk)
    except (Full, Unavailable) as error:
        log.warning("cannot pack the curves of a job; they will be parsed", job_number=job_number, error=str(error))


def _next_chunk(database: Database, job_number: int) -> CurveChunk | None:
    """Chunk after the last stored one; None before there are enough events."""
    with database.read() as tx:
        after_id = last_chunk_end(tx, job_number)
        to_id = after_id + CHUNK_EVENTS
        if last_event_id(tx, job_number) < to_id:
            return None
        curves = JobCurves()
        for rows in metric_rows(tx, job_number, after_id, to_id):
            curves.extend(rows)
    return CurveChunk(after_id, to_id, curves.packed())
