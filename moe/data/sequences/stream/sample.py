"""The part of a stream that is prepared before training: what is held out for evaluation, and a sample of the rest for
a tokenizer and for statistics."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from moe.data.conversations.template import ChatTemplate
from moe.data.corpus import CHECK_BYTES
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.sequences.chat_sources import chat_sources, packing_of
from moe.data.sequences.conversation_check import check_conversations
from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.documents import files_by_source, reader_of
from moe.data.sequences.stream.records import RecordSource, RecordSources, files_place
from moe.data.sequences.stream.shards import Shard, ShardList, spread
from moe.spec import ChatSpec, StreamableSpec, spec_error

READ_BYTES, TRAIN_BYTES = 32 << 20, 8 << 20
"""Bytes of text that are read of all sources together, and those of them that are prepared for training."""
_MAX_FILES = 8
"""Files of each source whose beginnings are read."""


class StreamSample(DocumentCorpus):
    """Documents at the beginnings of a stream's files: all that are held out, and some others."""

    def __init__(
        self,
        data: StreamableSpec,
        roots: Sequence[str] | None,
        shards: bytes | None = None,
        template: ChatTemplate | None = None,
        closing_tokens: tuple[str, ...] = (),
    ) -> None:
        """`shards`: the list of an earlier attempt. Default: what the spec's paths name now. `template` and
        `closing_tokens`, as of `Conversations`, if there are conversations."""
        self._data, self._roots, self._recorded = data, roots, shards
        self._sources, self._closing_tokens = RecordSources(data, template), closing_tokens
        self._counts: Counter[str] = Counter()
        self.has_spans = isinstance(data, ChatSpec)

    @cached_property
    def shards(self) -> ShardList:
        """The stream's files. Raises SpecError."""
        if self._recorded is not None:
            return ShardList.from_bytes(self._recorded, self._roots)
        return ShardList.of_spec(self._data, self._roots)

    @property
    def training(self) -> tuple[DocumentSource, ...]:
        return tuple(DocumentSource(name, weight) for name, weight in self._data.source_weights.items())

    @property
    def held_out(self) -> tuple[str, ...]:
        return self._data.held_out_sets

    @property
    def packing(self) -> str:
        return packing_of(self._data) if isinstance(self._data, ChatSpec) else "by_source"

    @property
    def plain_sources(self) -> frozenset[str]:
        if not self.has_spans:
            return frozenset()
        sources = zip(self._data.source_names, self.shards.sources, strict=True)
        return frozenset(name for name, source in sources if source.format is not None)

    def check(self) -> tuple[str, ...]:
        """Check the beginnings of some files of each source."""
        faults, locator, warnings = Faults.from_spec(self._data), Locator(self._roots), tuple[str, ...]()
        if isinstance(self._data, ChatSpec):
            sources = [
                source._replace(files=spread(source.files, _MAX_FILES)) for source in chat_sources(self._data, locator)
            ]
            assert self._sources.conversations is not None
            warnings = check_conversations(self._sources.conversations, sources, faults, self._closing_tokens)
        else:
            limit_bytes = CHECK_BYTES // (_MAX_FILES * len(self._data.sources))
            for index, (format, files) in enumerate(files_by_source(self._data, locator)):
                reader_of(self._data, index, format).check(spread(files, _MAX_FILES), faults, limit_bytes)
        if not faults.skips:  # else their share is known while training
            faults.require_none()
        return warnings

    @property
    def user_files(self) -> list[Location]:
        return [shard.file.location for shard in self.shards]

    def fingerprint(self) -> str:
        return self.shards.fingerprint()

    def documents(self) -> Iterator[SourceDocument]:
        self._counts = Counter()
        if self._sources.conversations is not None:
            self._sources.conversations.clear()
        faults = Faults.from_spec(self._data)
        for index, shards in enumerate(self.shards.sources):
            source, some_shards = self._sources.source(index, shards.format), spread(shards.shards, _MAX_FILES)
            num_before = self._counts["read"]
            yield from source.documents(self._records(source, some_shards, faults), faults)
            faults.end_file()
            if self._counts["read"] == num_before:
                places = ", ".join(str(shard.file.location) for shard in some_shards[:3])
                rule = "has no documents with text at the beginnings of its files"
                raise spec_error("empty", files_place(self._data, index), places, rule, "add text, or omit it")
        self._counts["bad"] = faults.num_bad

    def _records(self, source: RecordSource[Any], shards: Sequence[Shard], faults: Faults) -> Iterator[Any]:
        """Records at the beginnings of a source's shards: all that are held out, and a share of TRAIN_BYTES."""
        num_sources = len(self._data.source_names)
        num_left = TRAIN_BYTES // num_sources
        for shard in shards:
            for record in source.records(shard.file, faults, READ_BYTES // (num_sources * len(shards))):
                if not (text_bytes := source.text_bytes(record)):
                    self._counts["empty"] += 1
                    continue
                self._counts["read"] += 1
                is_held_out = source.is_held_out(record)
                if is_held_out or num_left > 0:
                    num_left -= 0 if is_held_out else text_bytes
                    yield record
            faults.end_file()

    def facts(self) -> dict[str, object]:
        sources = {
            name: {
                "files": len(source.shards), "bytes": source.num_bytes,
                "text_bytes": round(source.num_bytes * source.text_per_byte),
            }
            for name, source in zip(self._data.source_names, self.shards.sources, strict=True)
        }  # fmt: skip
        conversations = self._sources.conversations
        left_out = {name: self._counts[name] for name in ("empty", "bad") if name in self._counts}
        return {
            **({} if conversations is None else {**conversations.facts(), "plain_sources": sorted(self.plain_sources)}),
            "corpus": self._data.corpus, "files": len(self.user_files), "left_out": left_out, "stream": sources,
        }  # fmt: skip
