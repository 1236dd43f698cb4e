"""Takes over from storage what a run recorded while nobody listened, once its processes are gone."""

from itertools import islice

from moe.storage.folder import Folder
from service.control.report.ingest import Ingest
from service.wire.events import MAX_BATCH_RECORDS, SealedRecord
from service.wire.segments import SegmentFolder


def catch_up(ingest: Ingest, job_id: str, attempt: int, storage: Folder) -> int:
    """Stores the job's sealed records that never arrived; answers with their number. Raises OSError.

    Also those of earlier attempts: what one that was killed had not sealed yet, the next one seals for it.
    """
    folder = SegmentFolder(storage, "metrics")
    total = 0
    for writer in folder.writers():
        if writer.attempt > attempt:
            continue
        known = ingest.next_seq(job_id, writer.attempt, writer.record_writer)
        sealed = folder.records(writer, known)
        while records := tuple(islice(sealed, MAX_BATCH_RECORDS)):
            first = records[0].seq
            consecutive = _consecutive(records)
            total += ingest.take_over(job_id, writer.attempt, writer.record_writer, first, consecutive)
    return total


def _consecutive(records: tuple[SealedRecord, ...]) -> tuple[SealedRecord, ...]:
    """The records up to the first hole in their sequence."""
    first = records[0].seq
    for index, record in enumerate(records):
        if record.seq != first + index:
            return records[:index]
    return records
