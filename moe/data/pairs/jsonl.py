"""The corpus `jsonl`: an object a line, with a source, a target and the source's language."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from moe.data.json_lines import kind_of, parsed
from moe.data.lines import Lines
from moe.data.locations import Location, Locator
from moe.data.pairs.corpus import CHECK_BYTES, Corpus, combined_fingerprint, require_languages
from moe.data.pairs.pair import Pair
from moe.spec import JsonlSpec, Problem, SpecError
from moe.spec.base import LANGUAGE_CODE, LANGUAGE_CODE_REMEDY


class Jsonl(Corpus):
    """Pairs from JSON Lines files."""

    def __init__(self, data: JsonlSpec, roots: Sequence[str] | None) -> None:
        self._data = data
        self._locator = Locator(roots)

    @cached_property
    def _files(self) -> list[tuple[str, Location]]:
        """(place in the spec, file), each file once."""
        place_of: dict[Location, str] = {}
        for index, path in enumerate(self._data.paths):
            for location in self._locator.locate(f"data.paths[{index}]", path):
                place_of.setdefault(location, f"data.paths[{index}]")
        return [(place, location) for location, place in place_of.items()]

    def check(self) -> None:
        langs: set[str] = set()
        ended = True
        for place, location in self._files:
            lines = Lines(place, location, CHECK_BYTES // len(self._files))
            langs.update(pair.lang for pair in self._read(lines))
            ended = ended and lines.ended
        if ended:
            require_languages(self._data.languages, langs)

    def fingerprint(self) -> str:
        return combined_fingerprint(location for _, location in self._files)

    def pairs(self) -> Iterator[Pair]:
        wanted = self._data.languages
        for place, location in self._files:
            for pair in self._read(Lines(place, location)):
                if wanted is None or pair.lang in wanted:
                    yield pair

    def facts(self) -> dict[str, object]:
        return {"corpus": "jsonl", "files": len(self._files)}

    def _read(self, lines: Lines) -> Iterator[Pair]:
        columns = {
            "lang_column": self._data.lang_column,
            "source_column": self._data.source_column,
            "target_column": self._data.target_column,
        }
        for number, line in lines:
            if not line.strip():
                continue
            row = parsed(lines, number, line)
            values: list[str] = []
            for field, column in columns.items():
                if column not in row:
                    there = ", ".join(map(repr, row)) if row else "no columns at all"
                    rule = f"is not a column of {lines.location}, line {number}, which has {there}"
                    raise SpecError(Problem(f"data.{field}", column, rule, "use one of those"))
                value = row[column]
                if not isinstance(value, str):
                    rule = f"has a {column!r} that is {kind_of(value)}, not text"
                    raise lines.broken(number, rule, "put a string there, or leave the line out")
                values.append(value)
            if not LANGUAGE_CODE.fullmatch(values[0]):
                rule = f"has a {self._data.lang_column!r} (={values[0][:40]!r}) that is no language code"
                raise lines.broken(number, rule, LANGUAGE_CODE_REMEDY)
            yield Pair(*values)
