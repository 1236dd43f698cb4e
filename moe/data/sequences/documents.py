"""The corpus `documents`: the user's own files."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.dataset_folder import locate_source
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.formats import DocumentReader
from moe.data.text import as_characters, is_held_out
from moe.spec import DocumentsSpec, spec_error
from moe.spec.data_files import Format

_KEY = b"shardyard held-out documents"


def is_held_out_document(text: str, share: float) -> bool:
    """Whether a document is among the held-out `share` of all documents."""
    return is_held_out(text, share, _KEY)


class SourceFiles(NamedTuple):
    """Files of one source."""

    format: Format
    files: list[DataFile]


def files_by_source(data: DocumentsSpec, locator: Locator) -> list[SourceFiles]:
    """Files of each source, in order; a file belongs to the first source and path that names it. Raises SpecError."""
    seen_locations: set[Location] = set()
    sources = []
    for index, source in enumerate(data.sources):
        place = f"data.sources[{index}]"
        format, files = locate_source(locator, place, source, seen_locations)
        if not files:
            rule = "names only files of earlier sources"
            raise spec_error("duplicate", f"{place}.{source.files_field}", None, rule, "remove the source")
        sources.append(SourceFiles(format or source.file_format or "jsonl", files))
    return sources


def reader_of(data: DocumentsSpec, index: int, format: Format) -> DocumentReader:
    """Reader of the files of a source by its index."""
    return DocumentReader(format, data.sources[index].column, f"data.sources[{index}]")


class DocumentFiles(DocumentCorpus):
    """Documents of JSON, Parquet, Arrow and text files. Empty ones are counted and skipped."""

    def __init__(self, data: DocumentsSpec, roots: Sequence[str] | None) -> None:
        self._data = data
        self._locator = Locator(roots)
        self._counts: Counter[str] = Counter()

    @property
    def training(self) -> tuple[DocumentSource, ...]:
        return tuple(DocumentSource(name, weight) for name, weight in self._data.source_weights.items())

    @property
    def held_out(self) -> tuple[str, ...]:
        return self._data.held_out_sets

    @cached_property
    def _files(self) -> list[tuple[DocumentReader, list[DataFile]]]:
        """Files of each source, with its reader; a file belongs to the first source and path that names it."""
        return [
            (reader_of(self._data, index, source.format), source.files)
            for index, source in enumerate(files_by_source(self._data, self._locator))
        ]

    def check(self) -> tuple[str, ...]:
        num_files, faults = len(self.user_files), Faults.from_spec(self._data)
        for reader, files in self._files:
            reader.check(files, faults, CHECK_BYTES // num_files)
        faults.require_none()
        return ()

    @property
    def user_files(self) -> list[Location]:
        return [file.location for _, files in self._files for file in files]

    def records(self, faults: Faults) -> Iterator[object]:
        for reader, files in self._files:
            for file in files:
                yield from reader.texts(file, faults)

    def fingerprint(self) -> str:
        fingerprints = [[file.location.fingerprint() for file in files] for _, files in self._files]
        return hashlib.sha256(repr(fingerprints).encode()).hexdigest()

    def documents(self) -> Iterator[SourceDocument]:
        self._counts = Counter()
        faults = Faults.from_spec(self._data)
        for index, (name, (reader, files)) in enumerate(zip(self._data.source_names, self._files, strict=True)):
            num_documents = 0
            for file in files:
                for text in reader.texts(file, faults):
                    if not text.strip():
                        self._counts["empty"] += 1
                        continue
                    num_documents += 1
                    text = as_characters(text)
                    yield SourceDocument(name, text, is_held_out_document(text, self._data.held_out))
                faults.end_file()
            if not num_documents:
                places = ", ".join(str(file.location) for file in files[:3])
                rule = "has no documents with text"
                place = f"data.sources[{index}].{self._data.sources[index].files_field}"
                raise spec_error("empty", place, places, rule, "add text, or omit it")

        faults.require_none()
        self._counts["bad"] = faults.num_bad

    def facts(self) -> dict[str, object]:
        return {"corpus": "documents", "files": len(self.user_files), "left_out": dict(self._counts)}
