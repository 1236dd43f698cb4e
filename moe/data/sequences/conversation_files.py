"""Records of conversations in users' files: an object a line, or a row of Parquet."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moe.data.conversations.records import ARGUMENTS, MEDIA, REJECTED
from moe.data.faults import Faults
from moe.data.json_lines import rows
from moe.data.lines import Lines
from moe.data.sequences.corpus import MAX_DOCUMENT_BYTES
from moe.data.sequences.formats import UNREADABLE, DataFile
from moe.spec import SpecError
from moe.spec.sequences import format_of

KEYS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "chosen", "rejected",
    "system", "history", "tools", "functions", ARGUMENTS, *MEDIA, *REJECTED,
)  # fmt: skip
"""Columns of Parquet files that are read."""
_ONE_OF = ("messages", "conversations", "instruction", "prompt", "chosen")
_SHORTER = "cut it into several conversations"


class ConversationRecord(NamedTuple):
    where: str
    """`, line 3` or `, row 3`, to be appended to the file's name."""
    row: Mapping[str, Any]
    num_bytes: int
    """Approximate number of bytes of its text."""


def records(
    file: DataFile, limit_bytes: int | None = None, faults: Faults | None = None
) -> Iterator[ConversationRecord]:
    """Records of a file, in order; with a limit, those within about that many bytes, and the first in any case. Raises
    SpecError, with the file and the line or row, for what cannot be read; a record that is no object is added to
    `faults`, if given."""
    file_records = _of_parquet(file, faults) if is_parquet(file) else _of_lines(file, limit_bytes, faults)
    num_bytes = 0
    for record in file_records:
        yield record
        num_bytes += record.num_bytes
        if limit_bytes is not None and num_bytes >= limit_bytes:
            return


def is_parquet(file: DataFile) -> bool:
    """Whether a file is Parquet by its name; other files hold JSON Lines."""
    return format_of(file.location.path) == "parquet"


class ConversationColumns:
    """Columns that Parquet files must have."""

    def require_column(self, file: DataFile, types: dict[str, str]) -> None:
        """Raise SpecError unless a file has a column with conversations."""
        if not any(key in types for key in _ONE_OF):
            column_names = ", ".join(map(repr, types)) if types else "no columns at all"
            raise file.broken(
                "missing", f"has {column_names}, and none of {', '.join(_ONE_OF)}", "name its columns so"
            )


def _without_nulls(value: Any) -> Any:
    """A row's value without nulls, which columns have wherever another row has a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(element) for key, element in value.items() if element is not None}
    return [_without_nulls(element) for element in value] if isinstance(value, list) else value


def _of_lines(file: DataFile, limit_bytes: int | None, faults: Faults | None) -> Iterator[ConversationRecord]:
    lines = Lines(
        file.place,
        file.location,
        limit_bytes,
        max_line_bytes=MAX_DOCUMENT_BYTES,
        remedy=_SHORTER,
        faults=faults,
    )
    for row in rows(lines, faults):
        yield ConversationRecord(row.where, row.values, row.num_bytes)


def _of_parquet(file: DataFile, faults: Faults | None) -> Iterator[ConversationRecord]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with file.location.raw() as raw, pyarrow.parquet.ParquetFile(raw) as parquet_file:
            names = parquet_file.schema_arrow.names
            ConversationColumns().require_column(file, dict.fromkeys(names, ""))
            for batch in parquet_file.iter_batches(
                batch_size=64, columns=[name for name in names if name in KEYS]
            ):
                for row in batch.to_pylist():
                    number += 1
                    if faults is not None:
                        faults.read()
                    yield ConversationRecord(
                        f", row {number}", _without_nulls(row), batch.nbytes // max(1, batch.num_rows)
                    )
    except SpecError:
        raise
    except (*UNREADABLE, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise file.broken(
            "unreadable", f"cannot be read as Parquet: {error}", "write the file anew"
        ) from None
