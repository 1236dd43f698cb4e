"""Documents in users' files: the text of each record."""

from collections.abc import Iterator, Sequence

from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.json_lines import kind_of
from moe.data.readers.columns import MISSING, holds, value_at
from moe.data.readers.json_reader import JsonReader
from moe.data.readers.kinds import table_kind
from moe.data.readers.reader import Record, RecordReader
from moe.data.readers.schemas import TEXT_TYPES, ColumnTypes
from moe.data.readers.tables import TableReader
from moe.data.readers.text_reader import TEXT, TextReader
from moe.spec import SpecError, spec_error
from moe.spec.data_files import Format


class DocumentReader:
    """Reads the texts of a source's files, each a column of a record."""

    def __init__(self, format: Format | None, column: str, place: str) -> None:
        """`place`: path of the source in the spec."""
        self._column, self._place = column, f"{place}.column"
        self._reader = self._reader_of(format)

    def _reader_of(self, format: Format | None) -> RecordReader:
        if format == "text":
            self._column = TEXT
            return TextReader()
        if (kind := table_kind(format)) is not None:
            return TableReader(kind, self._require_column, lambda name: holds(name, self._column))
        return JsonReader("split it into several documents")

    def check(self, files: Sequence[DataFile], faults: Faults, limit_bytes: int) -> None:
        """Check the beginnings of files, or only their schemas. Raises SpecError."""
        if isinstance(self._reader, TableReader):
            self._reader.check_columns(files)
            return
        for file in files:
            for _ in self.texts(file, faults, limit_bytes):
                pass

    def texts(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[str]:
        """Documents of a file, unprocessed. Limits and errors are those of `RecordReader.records`."""
        for record in self._reader.records(file, faults, limit_bytes):
            value = value_at(record.values, self._column)
            if isinstance(value, str):
                yield value
            else:
                faults.add(self._problem(file, record, value))

    def _problem(self, file: DataFile, record: Record, value: object) -> SpecError:
        if value is not MISSING:
            rule = f"has a {self._column!r} that is {kind_of(value)}, not text"
            return file.broken("wrong_type", rule, "write a string, or remove the record", record.position)
        key_names = ", ".join(map(repr, record.values)) if record.values else "no keys at all"
        rule = f"is not a key of {file.location}{record.position}, which has {key_names}"
        return spec_error("not_found", self._place, self._column, rule, "use one of these")

    def _require_column(self, file: DataFile, types: ColumnTypes) -> None:
        """Raise SpecError unless a file with columns of these types has a text column."""
        if self._column not in types:
            column_names = ", ".join(map(repr, types)) if types else "no columns at all"
            rule = f"is not a column of {file.location}, which has {column_names}"
            raise spec_error("not_found", self._place, self._column, rule, "use one of these")
        if types[self._column] not in TEXT_TYPES:
            rule = f"is a column of {types[self._column]} in {file.location}, not text"
            raise spec_error("wrong_type", self._place, self._column, rule, "name a column of strings")
