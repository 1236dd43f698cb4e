"""Columns of files by their schemas alone. Before a job is launched, schemas are read in a limited process,
`python -m moe.data.readers.schemas`: `check` runs where jobs are posted, and must load and trust little."""

import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moe.data.limited_process import apply_limits, run_limited

TIMEOUT_S, MEMORY_BYTES = 60.0, 4 << 30
TEXT_TYPES = ("string", "large_string", "string_view")
ColumnTypes = Mapping[str, str]
"""Types of columns, by name."""


def column_types(schema: Iterable[Any]) -> dict[str, str]:
    """Types of an Arrow schema's columns, by name; of objects, also those of their keys (`translation.de`)."""
    types = {}
    for field in schema:
        value_type = getattr(field.type, "value_type", None)  # that of a dictionary's entries
        types[str(field.name)] = str(value_type if str(value_type) in TEXT_TYPES else field.type)
        if types[str(field.name)].startswith("struct<"):
            inner_types = column_types(field.type.field(index) for index in range(field.type.num_fields))
            types |= {f"{field.name}.{name}": kind for name, kind in inner_types.items()}
    return types


def read_column_types(kind: str, headers: Sequence[bytes]) -> list[ColumnTypes | str]:
    """Types of columns by the parts of files that have their schemas, or what is wrong with each. `kind`: `parquet` or
    `arrow`. Raises LimitedProcessError."""
    request = f"{kind}\n".encode() + b"".join(struct.pack("<Q", len(header)) + header for header in headers)
    answer = run_limited("moe.data.readers.schemas", request, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
    results: list[ColumnTypes | str] = json.loads(answer)
    return results


def _schema(kind: str, header: bytes) -> Any:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        return pyarrow.parquet.read_schema(pyarrow.BufferReader(b"PAR1" + header))
    return pyarrow.ipc.read_schema(pyarrow.BufferReader(header))


def _main() -> None:
    apply_limits()
    import pyarrow

    kind, _, content = sys.stdin.buffer.read().partition(b"\n")
    results: list[dict[str, str] | str] = []
    for header in _headers(content):
        try:
            results.append(column_types(_schema(kind.decode(), header)))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            results.append(str(error)[:200])
    sys.stdout.write(json.dumps(results))


def _headers(content: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(content):
        (num_bytes,) = struct.unpack_from("<Q", content, offset)
        yield content[offset + 8 : offset + 8 + num_bytes]
        offset += 8 + num_bytes


if __name__ == "__main__":
    _main()
