"""The corpora `chat`, `preference` and `unpaired_preference`: the user's conversations, rendered by a chat template."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from moe.data.chunks import chunks
from moe.data.conversations.conversation import NOTES, Conversation, Rendering, UnreadableRecord
from moe.data.conversations.labels import labelled_of
from moe.data.conversations.records import ARGUMENTS, LABELS, MEDIA, conversation_of, pair_of
from moe.data.conversations.template import ChatTemplate
from moe.data.corpus import CHECK_BYTES
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.readers.json_reader import JsonReader
from moe.data.readers.kinds import table_format, table_kind
from moe.data.readers.reader import RecordReader
from moe.data.readers.schemas import ColumnTypes
from moe.data.readers.tables import TableReader
from moe.data.sequences.chat_sources import ChatSource, chat_sources, packing_of, training_sources
from moe.data.sequences.corpus import DocumentCorpus, DocumentSource, SourceDocument
from moe.data.sequences.documents import is_held_out_document
from moe.data.text import as_characters, is_held_out
from moe.spec import ConversationsSpec, PreferenceSpec, UnpairedPreferenceSpec, spec_error
from moe.spec.data_files import Format

KEYS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "chosen", "rejected",
    "system", "history", "tools", "functions", ARGUMENTS, *MEDIA, *LABELS,
)  # fmt: skip
"""Columns of Parquet files that are read."""
_ONE_OF = ("messages", "conversations", "instruction", "prompt", "chosen")
_SHORTER = "split it into several conversations"


def conversation_reader(file: DataFile) -> RecordReader:
    """Reader of a file with conversations: rows of Parquet or Arrow, otherwise JSON."""
    kind = table_kind(table_format(file))
    return (
        JsonReader(_SHORTER) if kind is None else TableReader(kind, _require_conversations, lambda name: name in KEYS)
    )


def _require_conversations(file: DataFile, types: ColumnTypes) -> None:
    """Raise SpecError unless a file with columns of these types has one with conversations."""
    if not any(key in types for key in _ONE_OF):
        column_names = ", ".join(map(repr, types)) if types else "no columns at all"
        rule = f"has {column_names}, but none of {', '.join(_ONE_OF)}"
        raise file.broken("missing", rule, "rename its columns")


_KEY = b"shardyard held-out conversations"
_CHUNK_BYTES, _CHUNK = 8 << 20, 1000
"""Bytes of a batch of records to render, and their number."""
_WAYS = {False: "the text that each answer adds", True: "the template's generation marks"}
"""Ways to find the assistant's text, by whether the template marks it."""
_CHECKED = 32
"""Records of each file that are rendered before a job is launched."""
_MAX_CHECKED_FILES = 16
_READ, _MAX_UNREAD = frozenset(KEYS), 20
"""Keys of records that are read, and the number of other keys in a report."""
_ENDLESS = (
    "no learned text ends in a token that ends generation, so the model would never learn "
    "to stop; name that token by eos_token_id in the folder's generation_config.json, or a "
    "template that renders one by data.chat_template"
)
_MAX_REFUSED = 10
"""Number of refused conversations from which each further one checks the share, since each costs a process."""


def _check_columns(files: Sequence[DataFile]) -> list[DataFile]:
    """Check the columns of files that have some; return the others."""
    files_by_format: dict[Format | None, list[DataFile]] = {}
    for file in files:
        files_by_format.setdefault(table_format(file), []).append(file)
    for format_files in files_by_format.values():
        reader = conversation_reader(format_files[0])
        if isinstance(reader, TableReader):
            reader.check_columns(format_files)
    return files_by_format.get(None, [])


class _ConversationEntry(NamedTuple):
    """A record with its conversations."""

    file: DataFile
    position: str
    conversations: tuple[Conversation, ...]
    labels: tuple[bool, ...] | None
    """Whether each is desirable; None without labels."""
    num_bytes: int


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
        self._data, self._template, self._closing_tokens = data, template, closing_tokens
        self._locator = Locator(roots)
        self._is_pair = isinstance(data, PreferenceSpec)
        self.num_linked = 2 if self._is_pair else 1
        self.has_labels = isinstance(data, UnpairedPreferenceSpec)
        self._answers_per_record: int | None = None
        """Number of answers of the first labelled record: all must have as many."""
        self._ways = set[bool]()
        self._counts = Counter[str]()
        self._unread = set[str]()
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
        num_files = len(self.user_files)
        sample_entries: list[_ConversationEntry] = []
        faults = Faults.from_spec(self._data)
        for source in self._sources:
            if source.documents is not None:
                source.documents.check(source.files, faults, CHECK_BYTES // num_files)
                continue
            for file in _check_columns(source.files):
                entries = list(self._entries([file], faults, CHECK_BYTES // num_files))
                if not entries and not faults.num_bad:
                    raise file.broken("empty", "has no records", "add some, or omit it")
                sample_entries += entries[:_CHECKED] if len(sample_entries) < _CHECKED * _MAX_CHECKED_FILES else []
        rows = [
            row
            for _, renderings in self._render_entries(sample_entries, faults)
            for rendering in renderings
            for row in rendering.rows
        ]
        faults.require_none()
        has_closer = any(
            row.text[begin:end].rstrip().endswith(self._closing_tokens) for row in rows for begin, end in row.spans
        )
        return () if has_closer or not rows else (_ENDLESS,)

    @property
    def user_files(self) -> list[Location]:
        return [file.location for source in self._sources for file in source.files]

    def records(self, faults: Faults) -> Iterator[object]:
        for source in self._sources:
            yield from self._entries(source.files, faults) if source.documents is None else source.texts(faults)

    def fingerprint(self) -> str:
        fingerprints = [[file.location.fingerprint() for file in source.files] for source in self._sources]
        # A spec without sources has the fingerprint that it had before there were any.
        facts: list[Any] = fingerprints[0] if self._data.sources is None else fingerprints
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def documents(self) -> Iterator[SourceDocument]:
        counts = self._counts = Counter()
        faults = self._faults = Faults.from_spec(self._data)
        self._unread.clear()
        empty_sources = list[ChatSource]()
        for source in self._sources:
            num_before = counts["conversations"] + counts["documents"]
            yield from self._documents(source) if source.documents is None else self._plain_documents(source)
            if counts["conversations"] + counts["documents"] == num_before:
                empty_sources.append(source)
        faults.require_none()
        for source in empty_sources:
            raise spec_error("empty", source.files_place, source.places, "has no records", "add some, or omit it")

    def _documents(self, source: ChatSource) -> Iterator[SourceDocument]:
        """Rendered conversations of a source."""
        counts, entries = self._counts, self._entries(source.files, self._faults)
        rejected = list[SourceDocument]()
        """Rejected answers of pairs with labels, which follow the chosen ones of many pairs, as in TRL: neighbours have
        different prompts."""
        for entry, renderings in self._render_entries(entries, self._faults):
            counts["conversations"] += 1
            is_held_out = self._is_held_out(entry.conversations[0])
            for rendering, is_desirable in zip(renderings, entry.labels or (None,) * len(renderings), strict=True):
                counts["apart"] += len(rendering.rows) > 1
                counts["rows_apart"] += len(rendering.rows) if len(rendering.rows) > 1 else 0
                counts.update(rendering.notes)
                if is_desirable is not None:
                    counts["desirable" if is_desirable else "undesirable"] += 1
                for row in rendering.rows:
                    self._ways.add(row.by_marks)
                    document = SourceDocument(
                        source.name, as_characters(row.text), is_held_out, row.spans, row.by_marks, is_desirable
                    )
                    if len(renderings) == 2 and is_desirable is False:
                        rejected.append(document)
                    else:
                        yield document
            if len(rejected) >= _CHUNK:
                yield from rejected
                rejected.clear()
        yield from rejected

    def _plain_documents(self, source: ChatSource) -> Iterator[SourceDocument]:
        """Documents of a source."""
        for text in source.texts(self._faults):
            if not text.strip():
                self._counts["empty"] += 1
                continue
            self._counts["documents"] += 1
            text = as_characters(text)
            yield SourceDocument(source.name, text, is_held_out_document(text, self._data.held_out))

    def facts(self) -> dict[str, object]:
        ways_text = " or ".join(_WAYS[way] for way in sorted(self._ways))
        names = ("conversations", "apart", "rows_apart", *NOTES)
        labels = {"labels": {name: self._counts[name] for name in ("desirable", "undesirable")}}
        return {
            **(labels if self.has_labels else {}),
            "corpus": self._data.corpus, "files": len(self.user_files),
            "left_out": {"bad": self._faults.num_bad, "empty": self._counts["empty"]},
            "learned_by": ways_text, "written": {name: self._counts[name] for name in names},
            "plain_sources": sorted(self.plain_sources), "unread": sorted(self._unread)[:_MAX_UNREAD],
        }  # fmt: skip

    def _entries(
        self, files: Iterable[DataFile], faults: Faults, limit_bytes: int | None = None
    ) -> Iterator[_ConversationEntry]:
        for file in files:
            for position, row, num_bytes in conversation_reader(file).records(file, faults, limit_bytes):
                if len(self._unread) < _MAX_UNREAD:
                    self._unread |= row.keys() - _READ
                try:
                    conversations, labels = self._conversations_of(row)
                except UnreadableRecord as error:
                    faults.add(file.broken("invalid_value", error.rule, error.remedy, position))
                else:
                    yield _ConversationEntry(file, position, conversations, labels, num_bytes)

    def _conversations_of(self, row: Mapping[str, Any]) -> tuple[tuple[Conversation, ...], tuple[bool, ...] | None]:
        """(conversations, their labels if they have some) of a record. Raises UnreadableRecord."""
        if not self.has_labels:
            return (pair_of(row) if self._is_pair else (conversation_of(row),)), None
        conversations, labels = zip(*labelled_of(row), strict=True)
        self._answers_per_record = self._answers_per_record or len(labels)
        if len(labels) != self._answers_per_record:
            kinds = {1: "an answer with a label", 2: "a pair of answers"}
            rule = f"is {kinds[len(labels)]}, but earlier records are {kinds[self._answers_per_record]} each"
            raise UnreadableRecord(rule, "use records of one kind: submit a job for each, or convert them")
        return conversations, labels

    def _render_entries(
        self, entries: Iterable[_ConversationEntry], faults: Faults
    ) -> Iterator[tuple[_ConversationEntry, tuple[Rendering, ...]]]:
        """Each entry with its renderings; an entry that the template refuses is added to `faults`."""
        num_refused = 0
        for chunk in chunks(entries, _rendered_bytes, _CHUNK_BYTES, _CHUNK):
            remaining = chunk
            while remaining:
                renderings = self._template.render_rows(
                    [conversation for entry in remaining for conversation in entry.conversations]
                )
                for index, entry in enumerate(remaining):
                    outcomes = list(islice(renderings, len(entry.conversations)))
                    refusal = next(filter(None, map(self._refusal, outcomes)), None)
                    if refusal is None:
                        yield entry, tuple(outcome for outcome in outcomes if isinstance(outcome, Rendering))
                        continue
                    rule = f"has a conversation that the chat template of {self._template.place} {refusal.rule}"
                    faults.add(entry.file.broken("unsupported", rule, refusal.remedy, entry.position))
                    num_refused += 1
                    if num_refused >= _MAX_REFUSED:
                        faults.require_none()
                    if isinstance(outcomes[-1], UnreadableRecord):  # render the entries after it again
                        remaining = remaining[index + 1 :]
                        break
                else:
                    remaining = []

    def _refusal(self, rendering: Rendering | UnreadableRecord) -> UnreadableRecord | None:
        """Reason to refuse a rendering: the template's own, or a preference that would need several rows; None
        if it can be learned."""
        if isinstance(rendering, UnreadableRecord):
            return rendering
        if not (self._is_pair or self.has_labels) or len(rendering.rows) == 1:
            return None
        rule = f"renders as {len(rendering.rows)} rows, since its earlier answers change when more messages follow"
        remedy = "make 'chosen' and 'rejected' one answer each, after the same messages"
        return UnreadableRecord(rule, remedy if self._is_pair else "make the part to learn one answer")

    def _is_held_out(self, conversation: Conversation) -> bool:
        prompt = json.dumps(conversation.messages[: conversation.first_answer], sort_keys=True, default=str)
        return is_held_out(prompt, self._data.held_out, _KEY)


def _rendered_bytes(entry: _ConversationEntry) -> int:
    """Approximate bytes to render: a record's bytes once for each message."""
    return entry.num_bytes * sum(len(conversation.messages) for conversation in entry.conversations)
