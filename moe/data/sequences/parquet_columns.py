"""Columns of Parquet files, by their footers, read in a limited process: `check` runs where jobs are posted, and what
it loads and trusts there is little. `python -m moe.data.sequences.parquet_columns` is that process."""

import json
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from moe.data.limited_process import NoAnswer, answer_of, take_limits
from moe.data.sequences.formats import DataFile, column_types, footer_of

TIMEOUT_S, MEMORY_BYTES = 60.0, 4 << 30
MAX_FILES = 64
"""Files of a source whose columns are checked before a job is launched; those of others are checked when they are
read."""


class ColumnDemand(Protocol):
    """Columns that files must have."""

    def require_column(self, file: DataFile, types: dict[str, str]) -> None:
        """Raise SpecError unless a file with columns of these types has those that are needed."""


def check_columns(reader: ColumnDemand, files: Sequence[DataFile]) -> None:
    """Raise SpecError for a file without the column, or that is no Parquet."""
    looked_at = files[:MAX_FILES]
    request = b"".join(struct.pack("<Q", len(footer)) + footer for footer in map(footer_of, looked_at))
    try:
        answer = answer_of(
            "moe.data.sequences.parquet_columns", request, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES
        )
    except NoAnswer as error:
        raise looked_at[0].broken(
            "unreadable", f"cannot be read as Parquet: {error}", "write the file anew"
        ) from None
    for file, result in zip(looked_at, json.loads(answer), strict=True):
        if isinstance(result, str):
            raise file.broken("unreadable", f"cannot be read as Parquet: {result}", "write the file anew")
        reader.require_column(file, result)


def _main() -> None:
    take_limits()
    import pyarrow
    import pyarrow.parquet

    results: list[dict[str, str] | str] = []
    for footer in _footers(sys.stdin.buffer.read()):
        try:
            schema = pyarrow.parquet.read_schema(pyarrow.BufferReader(b"PAR1" + footer))
            results.append(column_types(schema))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            results.append(str(error)[:200])
    sys.stdout.write(json.dumps(results))


def _footers(request: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(request):
        (num_bytes,) = struct.unpack_from("<Q", request, at)
        yield request[at + 8 : at + 8 + num_bytes]
        at += 8 + num_bytes


if __name__ == "__main__":
    _main()
