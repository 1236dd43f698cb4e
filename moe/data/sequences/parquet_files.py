"""Parquet files: rows, and columns by their footers. Before a job is launched, the footers are read in a limited
process, `python -m moe.data.sequences.parquet_files`: `check` runs where jobs are posted, and must load and trust
little."""

import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moe.data.data_file import DataFile
from moe.data.file_kinds import DAMAGED
from moe.data.limited_process import LimitedProcessError, apply_limits, run_limited
from moe.data.sequences.corpus import MAX_DOCUMENT_BYTES
from moe.spec import SpecError

TIMEOUT_S, MEMORY_BYTES = 60.0, 4 << 30
MAX_FILES = 64
"""Files of a source whose columns are checked before a job is launched; those of others are checked when they are
read."""


TEXT_TYPES = ("string", "large_string", "string_view")
RequireColumns = Callable[[DataFile, dict[str, str]], None]
"""Function that raises SpecError unless a file with columns of these types has those that are needed."""


@contextmanager
def open_parquet(file: DataFile, require_columns: RequireColumns) -> Iterator[Any]:
    """A file as a `pyarrow.parquet.ParquetFile`. Raises SpecError for what cannot be read, also by the caller, and for
    missing columns."""
    import pyarrow
    import pyarrow.parquet

    try:
        with file.location.raw() as raw, pyarrow.parquet.ParquetFile(raw) as parquet_file:
            require_columns(file, _column_types(parquet_file.schema_arrow))
            yield parquet_file
    except SpecError:
        raise
    except (*DAMAGED, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: DataFile, reason: object) -> SpecError:
    return file.broken("unreadable", f"cannot be read as Parquet: {reason}", "write the file again")


def check_columns(require_columns: RequireColumns, files: Sequence[DataFile]) -> None:
    """Raise SpecError for a file without the columns, or that is no Parquet."""
    looked_at = files[:MAX_FILES]
    request = b"".join(struct.pack("<Q", len(footer)) + footer for footer in map(_footer, looked_at))
    try:
        answer = run_limited(
            "moe.data.sequences.parquet_files", request, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES
        )
    except LimitedProcessError as error:
        raise _unreadable(looked_at[0], error) from None
    for file, result in zip(looked_at, json.loads(answer), strict=True):
        if isinstance(result, str):
            raise _unreadable(file, result)
        require_columns(file, result)


def _column_types(schema: object) -> dict[str, str]:
    """Types of an Arrow schema's columns, by name."""
    types = {}
    for field in schema:  # type: ignore[attr-defined]
        value_type = getattr(field.type, "value_type", None)  # that of a dictionary's entries
        types[str(field.name)] = str(value_type if str(value_type) in TEXT_TYPES else field.type)
    return types


def _footer(file: DataFile) -> bytes:
    """Footer of a Parquet file, which lists its columns. Raises SpecError for other files."""
    try:
        with file.location.raw() as raw:
            end = raw.seek(0, 2)
            raw.seek(max(0, end - 8))
            tail = raw.read(8)
            num_bytes = int.from_bytes(tail[:4], "little") + 8
            if len(tail) < 8 or tail[4:] != b"PAR1" or num_bytes + 4 > end:
                raise file.broken("corrupt", "is not a Parquet file", "write it again, or set its format")
            if num_bytes > MAX_DOCUMENT_BYTES:
                raise file.broken(
                    "too_large", f"has a footer of {num_bytes} bytes", "write it again, with fewer row groups"
                )
            raw.seek(end - num_bytes)
            return raw.read(num_bytes)
    except DAMAGED as error:
        raise file.unreadable(error) from None


def _main() -> None:
    apply_limits()
    import pyarrow
    import pyarrow.parquet

    results: list[dict[str, str] | str] = []
    for footer in _footers(sys.stdin.buffer.read()):
        try:
            schema = pyarrow.parquet.read_schema(pyarrow.BufferReader(b"PAR1" + footer))
            results.append(_column_types(schema))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            results.append(str(error)[:200])
    sys.stdout.write(json.dumps(results))


def _footers(request: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(request):
        (num_bytes,) = struct.unpack_from("<Q", request, offset)
        yield request[offset + 8 : offset + 8 + num_bytes]
        offset += 8 + num_bytes


if __name__ == "__main__":
    _main()
