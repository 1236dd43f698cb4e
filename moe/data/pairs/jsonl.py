"""The corpus `jsonl`: one object per line, with a source, a target and the source's language."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile, locate_files
from moe.data.faults import Faults
from moe.data.json_lines import JsonRow, kind_of, rows
from moe.data.lines import Lines
from moe.data.locations import Location, Locator
from moe.data.pairs.corpus import PairCorpus, combined_fingerprint, require_languages
from moe.data.pairs.pair import Pair
from moe.spec import JsonlSpec, SpecError, spec_error
from moe.spec.base import LANGUAGE_CODE, LANGUAGE_CODE_REMEDY


class JsonlPairs(PairCorpus):
    """Pairs from JSON Lines files."""

    def __init__(self, data: JsonlSpec, roots: Sequence[str] | None) -> None:
        self._data = data
        self._locator = Locator(roots)
        self._num_bad = 0

    @cached_property
    def _files(self) -> list[DataFile]:
        return locate_files(self._locator, "data.paths", self._data.paths)

    def check(self) -> tuple[str, ...]:
        langs: set[str] = set()
        is_whole_corpus, faults = True, Faults.from_spec(self._data)
        for file in self._files:
            lines = Lines(file, CHECK_BYTES // len(self._files), faults=faults)
            langs.update(pair.lang for pair in self._read(lines, faults))
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
            yield from self._read(Lines(file, faults=faults), faults)

    def fingerprint(self) -> str:
        return combined_fingerprint(self.user_files)

    def pairs(self) -> Iterator[Pair]:
        languages = self._data.languages
        faults = Faults.from_spec(self._data)
        for file in self._files:
            for pair in self._read(Lines(file, faults=faults), faults):
                if languages is None or pair.lang in languages:
                    yield pair
            faults.end_file()
        faults.require_none()
        self._num_bad = faults.num_bad

    def facts(self) -> dict[str, object]:
        return {"corpus": "jsonl", "files": len(self._files), "bad": self._num_bad}

    def _read(self, lines: Lines, faults: Faults) -> Iterator[Pair]:
        for row in rows(lines, faults):
            try:
                pair = self._pair(lines, row)
            except SpecError as error:
                faults.add(error)
            else:
                yield pair

    def _pair(self, lines: Lines, row: JsonRow) -> Pair:
        columns = {
            "lang_column": self._data.lang_column,
            "source_column": self._data.source_column,
            "target_column": self._data.target_column,
        }
        values: list[str] = []
        for field, column in columns.items():
            if column not in row.values:
                column_names = ", ".join(map(repr, row.values)) if row.values else "no columns at all"
                rule = f"is not a column of {lines.file.location}{row.position}, which has {column_names}"
                raise spec_error("not_found", f"data.{field}", column, rule, "use one of these")
            value = row.values[column]
            if not isinstance(value, str):
                rule = f"has a {column!r} that is {kind_of(value)}, not text"
                remedy = "write a string, or remove the line"
                raise lines.file.broken("wrong_type", rule, remedy, row.position)
            values.append(value)
        if not LANGUAGE_CODE.fullmatch(values[0]):
            rule = f"has a {self._data.lang_column!r} (={values[0][:40]!r}) that is not a language code"
            raise lines.file.broken("invalid_value", rule, LANGUAGE_CODE_REMEDY, row.position)
        return Pair(*values)
