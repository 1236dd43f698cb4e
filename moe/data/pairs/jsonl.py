"""The corpus `jsonl`: records with a source, a target and the source's language."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.dataset_folder import locate_source
from moe.data.faults import Faults
from moe.data.json_lines import kind_of
from moe.data.lines import MAX_LINE_BYTES
from moe.data.locations import Location, Locator
from moe.data.pairs.corpus import PairCorpus, combined_fingerprint, require_languages
from moe.data.pairs.pair import Pair
from moe.data.readers.columns import MISSING, holds, value_at
from moe.data.readers.json_reader import JsonReader
from moe.data.readers.kinds import table_format, table_kind
from moe.data.readers.reader import Record
from moe.data.readers.schemas import TEXT_TYPES, ColumnTypes
from moe.data.readers.tables import TableReader
from moe.spec import JsonlSpec, SpecError, spec_error
from moe.spec.base import LANGUAGE_CODE, LANGUAGE_CODE_REMEDY


class JsonlPairs(PairCorpus):
    """Pairs from JSON, Parquet and Arrow files."""

    def __init__(self, data: JsonlSpec, roots: Sequence[str] | None) -> None:
        self._data = data
        self._locator = Locator(roots)
        self._num_bad = 0

    @cached_property
    def _files(self) -> list[DataFile]:
        return locate_source(self._locator, "data", self._data)[1]

    def check(self) -> tuple[str, ...]:
        langs: set[str] = set()
        is_whole_corpus, faults = True, Faults.from_spec(self._data)
        for file in self._files:
            reader = self._reader(file)
            if not isinstance(reader, JsonReader):
                reader.check_columns([file])
                is_whole_corpus = False
                continue
            lines = reader.lines(file, faults, CHECK_BYTES // len(self._files))
            langs.update(pair.lang for pair in self._pairs(file, reader.records_of(lines, faults), faults))
            is_whole_corpus = is_whole_corpus and lines.has_ended
        faults.require_none()
        if is_whole_corpus:
            require_languages(self._data.languages, langs)
        return ()

    @property
    def user_files(self) -> list[Location]:
        return [file.location for file in self._files]

    def records(self, faults: Faults) -> Iterator[Pair]:
        for file in self._files:
            yield from self._pairs(file, self._reader(file).records(file, faults), faults)

    def fingerprint(self) -> str:
        return combined_fingerprint(self.user_files)

    def pairs(self) -> Iterator[Pair]:
        languages = self._data.languages
        faults = Faults.from_spec(self._data)
        for file in self._files:
            for pair in self._pairs(file, self._reader(file).records(file, faults), faults):
                if languages is None or pair.lang in languages:
                    yield pair
            faults.end_file()
        faults.require_none()
        self._num_bad = faults.num_bad

    def facts(self) -> dict[str, object]:
        return {"corpus": "jsonl", "files": len(self._files), "bad": self._num_bad}

    def _reader(self, file: DataFile) -> JsonReader | TableReader:
        kind = table_kind(table_format(file))
        if kind is None:
            return JsonReader("write one pair per line", MAX_LINE_BYTES)
        return TableReader(kind, self._require_columns, self._is_read)

    @property
    def _columns(self) -> dict[str, str]:
        """Names of columns by the fields of the spec."""
        fields = ("lang_column", "source_column", "target_column")
        return {field: getattr(self._data, field) for field in fields[self._data.lang is not None :]}

    def _is_read(self, name: str) -> bool:
        return any(holds(name, column) for column in self._columns.values())

    def _require_columns(self, file: DataFile, types: ColumnTypes) -> None:
        """Raise SpecError unless a file with columns of these types has all of a pair."""
        for field, column in self._columns.items():
            if column not in types:
                raise self._missing_column(file, "", field, list(types))
            if types[column] not in TEXT_TYPES:
                rule = f"is a column of {types[column]} in {file.location}, not text"
                raise spec_error("wrong_type", f"data.{field}", column, rule, "name a column of strings")

    def _pairs(self, file: DataFile, records: Iterable[Record], faults: Faults) -> Iterator[Pair]:
        for record in records:
            try:
                pair = self._pair(file, record)
            except SpecError as error:
                faults.add(error)
            else:
                yield pair

    def _missing_column(self, file: DataFile, position: str, field: str, columns: Sequence[str]) -> SpecError:
        column_names = ", ".join(map(repr, columns)) if columns else "no columns at all"
        rule = f"is not a column of {file.location}{position}, which has {column_names}"
        return spec_error("not_found", f"data.{field}", getattr(self._data, field), rule, "use one of these")

    def _pair(self, file: DataFile, record: Record) -> Pair:
        values: list[str] = [] if self._data.lang is None else [self._data.lang]
        for field, column in self._columns.items():
            value = value_at(record.values, column)
            if value is MISSING:
                raise self._missing_column(file, record.position, field, list(record.values))
            if not isinstance(value, str):
                rule = f"has a {column!r} that is {kind_of(value)}, not text"
                raise file.broken("wrong_type", rule, "write a string, or remove the record", record.position)
            values.append(value)
        if not LANGUAGE_CODE.fullmatch(values[0]):
            rule = f"has a {self._data.lang_column!r} (={values[0][:40]!r}) that is not a language code"
            raise file.broken("invalid_value", rule, LANGUAGE_CODE_REMEDY, record.position)
        return Pair(*values)
