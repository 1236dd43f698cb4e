"""Rows of files with a schema as records."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from moe.data.compression import DAMAGED
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.limited_process import LimitedProcessError
from moe.data.readers.cells import Cells
from moe.data.readers.reader import MAX_RECORD_BYTES, Record, RecordReader
from moe.data.readers.schemas import ColumnTypes, column_types, read_column_types
from moe.spec import SpecError

MAX_FILES = 64
"""Files of a source whose columns are checked before a job is launched; those of others are checked when they are
read."""
_ROWS = 64
"""Rows converted at once."""

RequireColumns = Callable[[DataFile, ColumnTypes], None]
"""Function that raises SpecError unless a file with columns of these types has those that are needed."""


class Table(NamedTuple):
    """An open file."""

    schema: Any
    """Arrow's."""
    batches: Callable[[Sequence[str]], Iterator[Any]]
    """Function from names of columns to Arrow's record batches, read one by one."""


class TableKind(ABC):
    """Kind of file with a schema."""

    name: str
    """Name of the kind in specs."""

    @abstractmethod
    def open(self, file: DataFile) -> AbstractContextManager[Table]:
        """Open a file with pyarrow. Raises its errors and OSError."""

    @abstractmethod
    def header(self, file: DataFile) -> bytes:
        """The part of a file that has its schema. Raises SpecError for other files."""


class TableReader(RecordReader):
    """Rows of files of one kind."""

    def __init__(self, kind: TableKind, require_columns: RequireColumns, is_read: Callable[[str], bool]) -> None:
        """`is_read`: whether the column of a name is read."""
        self._kind, self._require_columns, self._is_read = kind, require_columns, is_read

    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[Record]:
        number = num_bytes = 0
        with self._open(file) as table:
            names = [name for name in table.schema.names if self._is_read(name)]
            cells = Cells([table.schema.field(name) for name in names])
            for batch in table.batches(names):
                for start in range(0, batch.num_rows, _ROWS):
                    for row in cells.rows(batch.slice(start, _ROWS)):
                        number += 1
                        faults.read()
                        problem = row.problem
                        if problem is None and row.num_chars > MAX_RECORD_BYTES:
                            problem = "too_large", f"is longer than {MAX_RECORD_BYTES} bytes", "split it into several"
                        if problem is not None:
                            faults.add(file.broken(*problem, f", row {number}"))
                            continue
                        yield Record(f", row {number}", row.values, row.num_chars)
                        num_bytes += row.num_chars
                        if limit_bytes is not None and num_bytes >= limit_bytes:
                            return

    @contextmanager
    def _open(self, file: DataFile) -> Iterator[Table]:
        """An open file with the columns. Raises SpecError for what cannot be read, also by the caller."""
        import pyarrow

        try:
            with self._kind.open(file) as table:
                self._require_columns(file, column_types(table.schema))
                yield table
        except SpecError:
            raise
        except (*DAMAGED, pyarrow.ArrowException, UnicodeDecodeError, MemoryError) as error:  # of a damaged length
            raise self._unreadable(file, str(error) or "a part has an impossible length") from None

    def check_columns(self, files: Sequence[DataFile]) -> None:
        """Raise SpecError for a file without the columns, or of another kind. Loads no pyarrow."""
        checked_files = files[:MAX_FILES]
        try:
            results = read_column_types(self._kind.name, [self._kind.header(file) for file in checked_files])
        except LimitedProcessError as error:
            raise self._unreadable(checked_files[0], error) from None
        for file, result in zip(checked_files, results, strict=True):
            if isinstance(result, str):
                raise self._unreadable(file, result)
            self._require_columns(file, result)

    def _unreadable(self, file: DataFile, reason: object) -> SpecError:
        kind = self._kind.name.capitalize()
        return file.broken("unreadable", f"cannot be read as {kind}: {reason}", "write the file again")
