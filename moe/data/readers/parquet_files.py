"""Parquet files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile
from moe.data.readers.reader import MAX_RECORD_BYTES
from moe.data.readers.tables import Table, TableKind

_BATCH_ROWS, _BUFFER_BYTES = 1024, 1 << 20


class ParquetFiles(TableKind):
    """Parquet files: one row group is read after the other, and each column's part of it in pieces."""

    name = "parquet"

    @contextmanager
    def open(self, file: DataFile) -> Iterator[Table]:
        import pyarrow.parquet

        with (
            file.location.raw() as raw,
            pyarrow.parquet.ParquetFile(raw, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet_file,
        ):

            def batches(columns: Sequence[str]) -> Iterator[Any]:
                for group in range(parquet_file.num_row_groups):
                    yield from parquet_file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(columns))

            yield Table(parquet_file.schema_arrow, batches)

    def header(self, file: DataFile) -> bytes:
        """Footer of a file."""
        try:
            with file.location.raw() as raw:
                end = raw.seek(0, 2)
                raw.seek(max(0, end - 8))
                tail = raw.read(8)
                num_bytes = int.from_bytes(tail[:4], "little") + 8
                if len(tail) < 8 or tail[4:] != b"PAR1" or num_bytes + 4 > end:
                    raise file.broken("corrupt", "is not a Parquet file", "write it again, or set its format")
                if num_bytes > MAX_RECORD_BYTES:
                    rule = f"has a footer of {num_bytes} bytes"
                    raise file.broken("too_large", rule, "write it again, with fewer row groups")
                raw.seek(end - num_bytes)
                return raw.read(num_bytes)
        except DAMAGED as error:
            raise file.unreadable(error) from None
