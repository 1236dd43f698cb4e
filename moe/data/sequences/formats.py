"""Documents in users' files, with one reader per format."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.file_kinds import DAMAGED, HEAD_BYTES, not_text_problem
from moe.data.json_lines import JsonRow, kind_of, rows
from moe.data.lines import Lines
from moe.data.sequences.corpus import MAX_DOCUMENT_BYTES
from moe.data.sequences.parquet_files import TEXT_TYPES, open_parquet
from moe.spec import ProblemCode, SourceSpec, SpecError, spec_error

_SHORTER = "split it into several documents"


class FormatReader(ABC):
    """Reads files of one format."""

    @abstractmethod
    def texts(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[str]:
        """Documents of a file, unprocessed; with `limit_bytes`, from about that many bytes, but at least one.

        Raises SpecError, with the file and the line or row, for unreadable content; one unreadable document of several
        is added to `faults`.
        """


class JsonlReader(FormatReader):
    """One object per line, whose `column` is the text."""

    def __init__(self, column: str, column_place: str) -> None:
        self._column, self._place = column, column_place

    def texts(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[str]:
        lines = Lines(file, limit_bytes, max_line_bytes=MAX_DOCUMENT_BYTES, remedy=_SHORTER, faults=faults)
        for row in rows(lines, faults):
            value = row.values.get(self._column)
            if isinstance(value, str):
                yield value
            else:
                faults.add(self._problem(file, row, value))

    def _problem(self, file: DataFile, row: JsonRow, value: object) -> SpecError:
        if self._column in row.values:
            rule = f"has a {self._column!r} that is {kind_of(value)}, not text"
            return file.broken("wrong_type", rule, "write a string, or remove the line", row.position)
        key_names = ", ".join(map(repr, row.values)) if row.values else "no keys at all"
        rule = f"is not a key of {file.location}{row.position}, which has {key_names}"
        return spec_error("not_found", self._place, self._column, rule, "use one of these")


class PlainText(FormatReader):
    """One document per file, as it is except for a byte-order mark."""

    def texts(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[str]:
        faults.read()
        try:
            yield self._text(file, limit_bytes)
        except SpecError as error:
            faults.add(error)

    def _text(self, file: DataFile, limit_bytes: int | None) -> str:
        max_bytes = MAX_DOCUMENT_BYTES if limit_bytes is None else min(limit_bytes, MAX_DOCUMENT_BYTES)
        try:
            with file.location.open() as stream:
                content = stream.read(max_bytes + 1)
        except DAMAGED as error:
            raise file.unreadable(error) from None
        if len(content) > MAX_DOCUMENT_BYTES:
            raise file.broken("too_large", f"is longer than {MAX_DOCUMENT_BYTES} bytes", "split it into several files")
        if (reason := not_text_problem(content[:HEAD_BYTES])) is not None:
            raise file.broken(*reason)
        is_cut, text = len(content) > max_bytes, content.removeprefix(codecs.BOM_UTF8)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            if not is_cut or error.start < len(text) - 4:  # else a character that the limit cut
                line = 1 + text.count(b"\n", 0, error.start)
                byte = len(content) - len(text) + error.start + 1
                rule = f"is not UTF-8 text at byte {byte} of the file"
                raise file.broken("invalid_encoding", rule, "save the file as UTF-8", f", line {line}") from None
            return text[: error.start].decode()


class Parquet(FormatReader):
    """One document per row, whose `column` is the text."""

    def __init__(self, column: str, column_place: str) -> None:
        self._column, self._place = column, column_place

    def texts(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[str]:
        row, num_bytes = 0, 0
        with open_parquet(file, self.require_column) as parquet_file:
            for batch in parquet_file.iter_batches(batch_size=256, columns=[self._column]):
                for value in batch.column(0):
                    row += 1
                    faults.read()
                    text, size = self._value(value)
                    if text is None or size > MAX_DOCUMENT_BYTES:
                        faults.add(self._problem(file, row, value, size))
                        continue
                    yield text
                    num_bytes += size
                    if limit_bytes is not None and num_bytes >= limit_bytes:
                        return

    def _value(self, value: Any) -> tuple[str | None, int]:
        """(text of a row, or None if it is missing or not UTF-8; number of bytes)"""
        try:
            text = value.as_py()
        except UnicodeDecodeError:
            return None, 0
        return (text, len(text.encode("utf-8", "surrogatepass"))) if isinstance(text, str) else (None, 0)

    def _problem(self, file: DataFile, row: int, value: Any, size: int) -> SpecError:
        if size > MAX_DOCUMENT_BYTES:
            return file.broken("too_large", f"is longer than {MAX_DOCUMENT_BYTES} bytes", _SHORTER, f", row {row}")
        code: ProblemCode = "invalid_encoding" if value.is_valid else "wrong_type"
        kind = "not UTF-8" if value.is_valid else f"{kind_of(None)}, not text"
        rule, remedy = f"has a {self._column!r} that is {kind}", "write a string, or remove the row"
        return file.broken(code, rule, remedy, f", row {row}")

    def require_column(self, file: DataFile, types: dict[str, str]) -> None:
        """Raise SpecError unless a file with columns of these types has a text column."""
        if self._column not in types:
            column_names = ", ".join(map(repr, types)) if types else "no columns at all"
            rule = f"is not a column of {file.location}, which has {column_names}"
            raise spec_error("not_found", self._place, self._column, rule, "use one of these")
        if types[self._column] not in TEXT_TYPES:
            rule = f"is a column of {types[self._column]} in {file.location}, not text"
            raise spec_error("wrong_type", self._place, self._column, rule, "name a column of strings")


def build_reader(source: SourceSpec, place: str) -> FormatReader:
    """Reader of a source's files; `place` is the path of the source in the spec."""
    match source.file_format:
        case "jsonl":
            return JsonlReader(source.column, f"{place}.column")
        case "parquet":
            return Parquet(source.column, f"{place}.column")
        case "text":
            return PlainText()
