"""Reads a run's undelivered records from storage, after its processes."""

from collections.abc import Callable, Iterator
from itertools import islice

from moe.storage.folder import Folder
from service.control.report.ingest import Ingest
from service.wire.events import MAX_BATCH_RECORDS, SealedRecord
from service.wire.segments import SegmentFolder, WriterFolder


def catch_up(ingest: Ingest, job_id: str, attempt: int, storage: Folder) -> int:
    """Store the job's undelivered sealed records; returns their number. Includes earlier attempts, whose remains the
    next one seals. Raises OSError."""
    total = 0

    def first_missing(writer: WriterFolder) -> int:
        return ingest.next_seq(job_id, writer.attempt, writer.record_writer)

    for writer, records in sealed_records(storage, attempt, first_missing):
        first = records[0].seq
        total += ingest.take_over(job_id, writer.attempt, writer.record_writer, first, records)
    return total


def sealed_records(
    storage: Folder, attempt: int, first_missing: Callable[[WriterFolder], int]
) -> Iterator[tuple[WriterFolder, tuple[SealedRecord, ...]]]:
    """Batches of consecutive records on storage, by writer, for attempts up to `attempt`, each from `first_missing`
    on. Raises OSError."""
    folder = SegmentFolder(storage, "metrics")
    for writer in folder.writers():
        if writer.attempt > attempt:
            continue
        writer_records = folder.records(writer, first_missing(writer))
        while records := tuple(islice(writer_records, MAX_BATCH_RECORDS)):
            yield writer, _consecutive(records)


def _consecutive(records: tuple[SealedRecord, ...]) -> tuple[SealedRecord, ...]:
    """The records up to the first gap in their sequence."""
    first = records[0].seq
    for index, record in enumerate(records):
        if record.seq != first + index:
            return records[:index]
    return records
