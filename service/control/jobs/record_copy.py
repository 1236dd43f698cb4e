"""Copy of a job's records on storage, read before a transaction since storage may hang."""

import tempfile
from collections.abc import Iterator

from moe.storage.folder import Folder
from service.control.report.catch_up import sealed_records
from service.wire.events import SealedRecord
from service.wire.segments import WriterFolder

MAX_MEMORY_BYTES = 1 << 26
"""Size above which the copy is in a temporary file."""


class RecordCopy:
    """A job's records by writer, in order; a context manager."""

    def __init__(self, storage: Folder, attempt: int) -> None:
        """Read the records up to `attempt`. Raises OSError."""
        self._file = tempfile.SpooledTemporaryFile(max_size=MAX_MEMORY_BYTES)  # noqa: SIM115  # closed in __exit__
        self._batches: list[tuple[WriterFolder, int]] = []
        try:
            for writer, records in sealed_records(storage, attempt, lambda _: 0):
                for record in records:
                    self._file.write(record.model_dump_json().encode() + b"\n")
                self._batches.append((writer, len(records)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "RecordCopy":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self) -> Iterator[tuple[WriterFolder, tuple[SealedRecord, ...]]]:
        """Batches of consecutive records, one writer after another."""
        self._file.seek(0)
        for writer, count in self._batches:
            yield writer, tuple(SealedRecord.model_validate_json(self._file.readline()) for _ in range(count))
