"""The corpus `documents`: the user's own files."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.dataset_folder import locate_source
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.formats import DocumentReader
from moe.data.text import as_characters, is_held_out
from moe.spec import DocumentsSpec, spec_error

_KEY = b"shardyard held-out documents"


class DocumentFiles(DocumentCorpus):
    """Documents of JSON, Parquet, Arrow and text files. Empty ones are counted and skipped."""

    def __init__(self, data: DocumentsSpec, roots: Sequence[str] | None) -> None:
        self._data = data
        self._locator = Locator(roots)
        self._counts: Counter[str] = Counter()

    @property
    def training(self) -> tuple[DocumentSource, ...]:
        return tuple(
            DocumentSource(name, source.weight)
            for name, source in zip(self._data.source_names, self._data.sources, strict=True)
        )

    @property
    def held_out(self) -> tuple[str, ...]:
        return self._data.held_out_sets

    @cached_property
    def _files(self) -> list[tuple[DocumentReader, list[DataFile]]]:
        """Files of each source, with its reader; a file belongs to the first source and path that names it."""
        seen_locations: set[Location] = set()
        files_by_reader = []
        for index, source in enumerate(self._data.sources):
            place = f"data.sources[{index}]"
            format, files = locate_source(self._locator, place, source, seen_locations)
            if not files:
                rule = "names only files of earlier sources"
                raise spec_error("duplicate", f"{place}.{source.files_field}", None, rule, "remove the source")
            reader = DocumentReader(format or source.file_format, source.column, place)
            files_by_reader.append((reader, files))
        return files_by_reader

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
                    yield SourceDocument(name, text, is_held_out(text, self._data.held_out, _KEY))
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
