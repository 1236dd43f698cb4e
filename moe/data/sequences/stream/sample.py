"""The part of a stream that is prepared before training: held-out documents for evaluation, and a sample of the others
for a tokenizer and for statistics."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

from moe.data.corpus import CHECK_BYTES
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.documents import files_by_source, is_held_out_document, reader_of
from moe.data.sequences.stream.shards import ShardList, spread
from moe.data.text import as_characters
from moe.spec import DocumentsSpec, spec_error

READ_BYTES, TRAIN_BYTES = 32 << 20, 8 << 20
"""Bytes of text that are read of all sources together, and those of them that are prepared for training."""
_MAX_FILES = 8
"""Files of each source whose beginnings are read."""


class StreamSample(DocumentCorpus):
    """Documents at the beginnings of a stream's files: all that are held out, and some others."""

    def __init__(self, data: DocumentsSpec, roots: Sequence[str] | None, shards: bytes | None = None) -> None:
        """`shards`: the list of an earlier attempt. Default: what the spec's paths name now."""
        self._data, self._roots, self._recorded = data, roots, shards
        self._counts: Counter[str] = Counter()

    @cached_property
    def shards(self) -> ShardList:
        """The stream's files. Raises SpecError."""
        if self._recorded is not None:
            return ShardList.from_bytes(self._recorded, self._roots)
        return ShardList.of_spec(self._data, self._roots)

    @property
    def training(self) -> tuple[DocumentSource, ...]:
        return tuple(
            DocumentSource(name, source.weight)
            for name, source in zip(self._data.source_names, self._data.sources, strict=True)
        )

    @property
    def held_out(self) -> tuple[str, ...]:
        return self._data.held_out_sets

    def check(self) -> tuple[str, ...]:
        """Check the beginnings of some files of each source."""
        faults = Faults.from_spec(self._data)
        for index, (format, files) in enumerate(files_by_source(self._data, Locator(self._roots))):
            some_files = spread(files, _MAX_FILES)
            limit_bytes = CHECK_BYTES // (_MAX_FILES * len(self._data.sources))
            reader_of(self._data, index, format).check(some_files, faults, limit_bytes)
        if not faults.skips:  # else their share is known while training
            faults.require_none()
        return ()

    @property
    def user_files(self) -> list[Location]:
        return [shard.file.location for shard in self.shards]

    def fingerprint(self) -> str:
        return self.shards.fingerprint()

    def documents(self) -> Iterator[SourceDocument]:
        self._counts = Counter()
        faults = Faults.from_spec(self._data)
        num_sources = len(self._data.sources)
        for index, (name, source) in enumerate(zip(self._data.source_names, self._data.sources, strict=True)):
            shards = self.shards.sources[index]
            reader, some_shards = reader_of(self._data, index, shards.format), spread(shards.shards, _MAX_FILES)
            num_left = TRAIN_BYTES // num_sources
            num_documents = 0
            for shard in some_shards:
                for text in reader.texts(shard.file, faults, READ_BYTES // (num_sources * len(some_shards))):
                    if not text.strip():
                        self._counts["empty"] += 1
                        continue
                    num_documents += 1
                    text = as_characters(text)
                    is_held_out = is_held_out_document(text, self._data.held_out)
                    if is_held_out or num_left > 0:
                        num_left -= 0 if is_held_out else len(text.encode())
                        yield SourceDocument(name, text, is_held_out)
                faults.end_file()
            if not num_documents:
                places = ", ".join(str(shard.file.location) for shard in some_shards[:3])
                rule = "has no documents with text at the beginnings of its files"
                raise spec_error(
                    "empty", f"data.sources[{index}].{source.files_field}", places, rule, "add text, or omit it"
                )
        self._counts["bad"] = faults.num_bad

    def facts(self) -> dict[str, object]:
        sources = {
            name: {
                "files": len(source.shards), "bytes": source.num_bytes,
                "text_bytes": round(source.num_bytes * source.text_per_byte),
            }
            for name, source in zip(self._data.source_names, self.shards.sources, strict=True)
        }  # fmt: skip
        return {
            "corpus": "documents", "files": len(self.user_files), "left_out": dict(self._counts), "stream": sources,
        }  # fmt: skip
