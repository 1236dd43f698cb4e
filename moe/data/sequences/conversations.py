"""The corpora `chat`, `preference` and `unpaired_preference`: the user's conversations, rendered by a chat template."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from moe.data.conversations.template import ChatTemplate
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.sequences.chat_sources import ChatSource, chat_sources, packing_of, training_sources
from moe.data.sequences.conversation_check import check_conversations
from moe.data.sequences.conversation_reader import ConversationReader
from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.documents import is_held_out_document
from moe.data.text import as_characters
from moe.spec import ConversationsSpec, PreferenceSpec, UnpairedPreferenceSpec, spec_error


class Conversations(DocumentCorpus):
    """Conversations of JSON Lines and Parquet files: one document per row (`chat`), two per pair, the preferred one
    first (`preference`), or one per labelled answer (`unpaired_preference`)."""

    has_spans = True

    def __init__(
        self,
        data: ConversationsSpec,
        template: ChatTemplate,
        roots: Sequence[str] | None,
        closing_tokens: tuple[str, ...] = (),
    ) -> None:
        """`closing_tokens`: texts of tokens that may close an answer: those that stop generation, and all special
        ones."""
        self._data, self._closing_tokens = data, closing_tokens
        self._reader, self._locator = ConversationReader(data, template), Locator(roots)
        self.num_linked = 2 if isinstance(data, PreferenceSpec) else 1
        self.has_labels = isinstance(data, UnpairedPreferenceSpec)
        self._faults = Faults.from_spec(data)

    @property
    def training(self) -> tuple[DocumentSource, ...]:
        return training_sources(self._data)

    @property
    def held_out(self) -> tuple[str, ...]:
        return self._data.held_out_sets

    @property
    def packing(self) -> str:
        return packing_of(self._data)

    @property
    def plain_sources(self) -> frozenset[str]:
        return frozenset(source.name for source in self._sources if source.documents is not None)

    @cached_property
    def _sources(self) -> list[ChatSource]:
        return chat_sources(self._data, self._locator)

    def check(self) -> tuple[str, ...]:
        faults = Faults.from_spec(self._data)
        warnings = check_conversations(self._reader, self._sources, faults, self._closing_tokens)
        faults.require_none()
        return warnings

    @property
    def user_files(self) -> list[Location]:
        return [file.location for source in self._sources for file in source.files]

    def records(self, faults: Faults) -> Iterator[object]:
        for source in self._sources:
            yield from self._reader.entries(source.files, faults) if source.documents is None else source.texts(faults)

    def fingerprint(self) -> str:
        fingerprints = [[file.location.fingerprint() for file in source.files] for source in self._sources]
        # A spec without sources has the fingerprint that it had before there were any.
        facts: list[Any] = fingerprints[0] if self._data.sources is None else fingerprints
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def documents(self) -> Iterator[SourceDocument]:
        self._reader.clear()
        counts, faults = self._reader.counts, Faults.from_spec(self._data)
        self._faults = faults
        empty_sources = list[ChatSource]()
        for source in self._sources:
            num_before = counts["conversations"] + counts["documents"]
            if source.documents is None:
                yield from self._reader.documents(source.name, self._reader.entries(source.files, faults), faults)
            else:
                yield from self._plain_documents(source)
            if counts["conversations"] + counts["documents"] == num_before:
                empty_sources.append(source)
        faults.require_none()
        for source in empty_sources:
            raise spec_error("empty", source.files_place, source.places, "has no records", "add some, or omit it")

    def _plain_documents(self, source: ChatSource) -> Iterator[SourceDocument]:
        """Documents of a source."""
        for text in source.texts(self._faults):
            if not text.strip():
                self._reader.counts["empty"] += 1
                continue
            self._reader.counts["documents"] += 1
            text = as_characters(text)
            yield SourceDocument(source.name, text, is_held_out_document(text, self._data.held_out))

    def facts(self) -> dict[str, object]:
        return {
            **self._reader.facts(), "corpus": self._data.corpus, "files": len(self.user_files),
            "left_out": {"bad": self._faults.num_bad, "empty": self._reader.counts["empty"]},
            "plain_sources": sorted(self.plain_sources),
        }  # fmt: skip
