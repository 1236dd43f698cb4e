"""The corpus `text`: two files per language; line i of one translates line i of the other."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.lines import Lines
from moe.data.locations import Location, Locator
from moe.data.pairs.corpus import PairCorpus, combined_fingerprint, require_languages
from moe.data.pairs.pair import Pair
from moe.spec import ParallelTextSpec, spec_error


class _Files(NamedTuple):
    place: str
    lang: str
    source: Location
    target: Location


class ParallelText(PairCorpus):
    """Pairs from plain parallel text files."""

    def __init__(self, data: ParallelTextSpec, roots: Sequence[str] | None) -> None:
        self._data = data
        self._locator = Locator(roots)
        self._num_bad = 0

    @cached_property
    def _files(self) -> list[_Files]:
        """Pairs of files in the requested languages; a `*` in both names pairs the files in order of name."""
        languages = self._data.languages
        files = []
        for index, pair in enumerate(self._data.files):
            if languages is not None and pair.lang not in languages:
                continue
            place = f"data.files[{index}]"
            sources = self._locator.locate(f"{place}.source", pair.source)
            targets = self._locator.locate(f"{place}.target", pair.target)
            if len(sources) != len(targets):
                counts = f"{len(sources)} source files, {len(targets)} target files"
                raise spec_error("mismatch", place, counts, "must match as many sources as targets", "name each file")
            files += [_Files(place, pair.lang, *locations) for locations in zip(sources, targets, strict=True)]
        return files

    def check(self) -> tuple[str, ...]:
        require_languages(self._data.languages, {pair.lang for pair in self._data.files})
        faults = Faults.from_spec(self._data)
        for files in self._files:
            for _ in _read(files, faults, CHECK_BYTES // (2 * len(self._files))):
                pass
        faults.require_none()
        return ()

    @property
    def user_files(self) -> list[Location]:
        return [location for files in self._files for location in (files.source, files.target)]

    def records(self, faults: Faults) -> Iterator[Pair]:
        for files in self._files:
            yield from _read(files, faults)

    def fingerprint(self) -> str:
        return combined_fingerprint(self.user_files)

    def pairs(self) -> Iterator[Pair]:
        faults = Faults.from_spec(self._data)
        for files in self._files:
            yield from _read(files, faults)
            faults.end_file()
        faults.require_none()
        self._num_bad = faults.num_bad

    def facts(self) -> dict[str, object]:
        return {"corpus": "text", "files": 2 * len(self._files), "bad": self._num_bad}


def _read(files: _Files, faults: Faults, limit_bytes: int | None = None) -> Iterator[Pair]:
    """The pairs of two files, or of their beginnings; a faulty line becomes an empty side. Raises SpecError for
    unequal numbers of lines."""
    sources = Lines(DataFile(f"{files.place}.source", files.source), limit_bytes, faults=faults)
    targets = Lines(DataFile(f"{files.place}.target", files.target), limit_bytes, faults=faults)
    num_sources = num_targets = 0
    num_records = faults.num_records
    for source, target in zip_longest(sources, targets):
        num_sources += source is not None
        num_targets += target is not None
        num_records += 1
        faults.read(num_records - faults.num_records)  # a faulty line was counted when it was read
        if source is not None and target is not None:
            yield Pair(files.lang, source[1], target[1])
    if sources.has_ended and targets.has_ended and num_sources != num_targets:
        counts = f"{num_sources} lines in {files.source}, {num_targets} in {files.target}"
        rule = "must have as many source lines as target lines"
        raise spec_error("mismatch", files.place, counts, rule, "align the files line by line")
