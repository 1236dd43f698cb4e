"""Records of conversations in users' files: an object a line, or a row of Parquet."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moe.data.conversations.records import ARGUMENTS, MEDIA, REJECTED
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.json_lines import rows
from moe.data.lines import Lines
from moe.data.sequences.corpus import MAX_DOCUMENT_BYTES
from moe.data.sequences.parquet_files import open_parquet
from moe.spec.sequences import format_of

KEYS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "chosen", "rejected",
    "system", "history", "tools", "functions", ARGUMENTS, *MEDIA, *REJECTED,
)  # fmt: skip
"""Columns of Parquet files that are read."""
_ONE_OF = ("messages", "conversations", "instruction", "prompt", "chosen")
_SHORTER = "split it into several conversations"


class ConversationRecord(NamedTuple):
    where: str
    """`, line 3` or `, row 3`, to be appended to the file's name."""
    row: Mapping[str, Any]
    num_bytes: int
    """Approximate number of bytes of its text."""


def records(file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[ConversationRecord]:
    """Records of a file, in order; with a limit, those within about that many bytes, and the first in any case. Raises
    SpecError, with the file and the line or row, for what cannot be read; a record that is no object is added to
    `faults`."""
    file_records = _of_parquet(file, faults) if is_parquet(file) else _of_lines(file, faults, limit_bytes)
    num_bytes = 0
    for record in file_records:
        yield record
        num_bytes += record.num_bytes
        if limit_bytes is not None and num_bytes >= limit_bytes:
            return


def is_parquet(file: DataFile) -> bool:
    """Whether a file is Parquet by its name; other files hold JSON Lines."""
    return format_of(file.location.path) == "parquet"


def require_conversations(file: DataFile, types: Mapping[str, str]) -> None:
    """Raise SpecError unless a Parquet file with columns of these types has one with conversations."""
    if not any(key in types for key in _ONE_OF):
        column_names = ", ".join(map(repr, types)) if types else "no columns at all"
        rule = f"has {column_names}, but none of {', '.join(_ONE_OF)}"
        raise file.broken("missing", rule, "rename its columns")


def _without_nulls(value: Any) -> Any:
    """A row's value without nulls, which columns have wherever another row has a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(element) for key, element in value.items() if element is not None}
    return [_without_nulls(element) for element in value] if isinstance(value, list) else value


def _of_lines(file: DataFile, faults: Faults, limit_bytes: int | None) -> Iterator[ConversationRecord]:
    lines = Lines(file, limit_bytes, max_line_bytes=MAX_DOCUMENT_BYTES, remedy=_SHORTER, faults=faults)
    for row in rows(lines, faults):
        yield ConversationRecord(row.where, row.values, row.num_bytes)


def _of_parquet(file: DataFile, faults: Faults) -> Iterator[ConversationRecord]:
    number = 0
    with open_parquet(file, require_conversations) as parquet_file:
        columns = [name for name in parquet_file.schema_arrow.names if name in KEYS]
        for batch in parquet_file.iter_batches(batch_size=64, columns=columns):
            for row in batch.to_pylist():
                number += 1
                faults.read()
                num_bytes = batch.nbytes // max(1, batch.num_rows)
                yield ConversationRecord(f", row {number}", _without_nulls(row), num_bytes)
