"""Files of Arrow's interprocess format: streams, as the library `datasets` writes them, and files with a footer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile
from moe.data.file_kinds import ARROW_MAGIC, ARROW_MESSAGE
from moe.data.readers.reader import MAX_RECORD_BYTES
from moe.data.readers.tables import Table, TableKind

_END = ARROW_MESSAGE + b"\0\0\0\0"
"""Last bytes of a complete stream."""


class ArrowFiles(TableKind):
    """Arrow files: one record batch is read after the other."""

    name = "arrow"

    @contextmanager
    def open(self, file: DataFile) -> Iterator[Table]:
        import pyarrow
        import pyarrow.ipc

        with file.location.raw() as raw, pyarrow.PythonFile(raw, mode="r") as stream:
            if not _skip_magic(raw):
                _require_end(file, raw)
                with pyarrow.ipc.open_stream(stream) as reader:
                    yield Table(reader.schema, lambda columns: (batch.select(list(columns)) for batch in reader))
                return
            raw.seek(0)
            with pyarrow.ipc.open_file(stream) as file_reader:

                def batches(columns: Sequence[str]) -> Iterator[Any]:
                    for index in range(file_reader.num_record_batches):
                        yield file_reader.get_batch(index).select(list(columns))

                yield Table(file_reader.schema, batches)

    def header(self, file: DataFile) -> bytes:
        """First message of a file, which is its schema."""
        try:
            with file.location.raw() as raw:
                _skip_magic(raw)
                prefix = raw.read(8)
                num_bytes = int.from_bytes(prefix[4:], "little")
                if len(prefix) < 8 or not prefix.startswith(ARROW_MESSAGE):
                    raise file.broken("corrupt", "is not an Arrow file", "write it again, or set its format")
                if num_bytes > MAX_RECORD_BYTES:
                    rule = f"has a schema of {num_bytes} bytes"
                    raise file.broken("too_large", rule, "write it again, with fewer columns")
                return prefix + raw.read(num_bytes)
        except DAMAGED as error:
            raise file.unreadable(error) from None


def _skip_magic(raw: IO[bytes]) -> bool:
    """Move to the first message of a file. Returns whether the file has a footer."""
    has_footer = raw.read(len(ARROW_MAGIC)) == ARROW_MAGIC
    if not has_footer:
        raw.seek(0)
    return has_footer


def _require_end(file: DataFile, raw: IO[bytes]) -> None:
    """Raise SpecError for a stream without end, whose last batches may be missing."""
    position = raw.tell()
    size = raw.seek(0, 2)
    raw.seek(max(0, size - len(_END)))
    if raw.read(len(_END)) != _END:
        rule = f"has no end after its {size:,} bytes: an Arrow stream was cut, or is still written"
        raise file.broken("unreadable", rule, "write or copy it again")
    raw.seek(position)
