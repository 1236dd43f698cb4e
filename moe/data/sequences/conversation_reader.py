"""Reading of conversations in users' files, and their rendering by a chat template."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from moe.data.chunks import chunks
from moe.data.conversations.conversation import NOTES, Conversation, Rendering, UnreadableRecord
from moe.data.conversations.labels import labelled_of
from moe.data.conversations.records import ARGUMENTS, LABELS, MEDIA, conversation_of, pair_of
from moe.data.conversations.template import ChatTemplate
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.readers.json_reader import JsonReader
from moe.data.readers.kinds import table_format, table_kind
from moe.data.readers.reader import RecordReader
from moe.data.readers.schemas import ColumnTypes
from moe.data.readers.tables import TableReader
from moe.data.sequences.corpus import SourceDocument
from moe.data.text import as_characters, is_held_out
from moe.spec import ConversationsSpec, PreferenceSpec, UnpairedPreferenceSpec
from moe.spec.data_files import Format

KEYS = (
    "messages", "conversations", "instruction", "input", "output", "prompt", "completion", "chosen", "rejected",
    "system", "history", "tools", "functions", ARGUMENTS, *MEDIA, *LABELS,
)  # fmt: skip
"""Columns of Parquet files that are read."""
_ONE_OF = ("messages", "conversations", "instruction", "prompt", "chosen")
_SHORTER = "split it into several conversations"
_KEY = b"shardyard held-out conversations"
_CHUNK_BYTES, _CHUNK = 8 << 20, 1000
"""Bytes of a batch of records to render, and their number."""
_WAYS = {False: "the text that each answer adds", True: "the template's generation marks"}
"""Ways to find the assistant's text, by whether the template marks it."""
_READ, _MAX_UNREAD = frozenset(KEYS), 20
"""Keys of records that are read, and the number of other keys in a report."""
_MAX_REFUSED = 10
"""Number of refused conversations from which each further one checks the share, since each costs a process."""


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


def check_columns(files: Sequence[DataFile]) -> list[DataFile]:
    """Check the columns of files that have some; return the others."""
    files_by_format: dict[Format | None, list[DataFile]] = {}
    for file in files:
        files_by_format.setdefault(table_format(file), []).append(file)
    for format_files in files_by_format.values():
        reader = conversation_reader(format_files[0])
        if isinstance(reader, TableReader):
            reader.check_columns(format_files)
    return files_by_format.get(None, [])


class ConversationEntry(NamedTuple):
    """A record with its conversations."""

    file: DataFile
    position: str
    conversations: tuple[Conversation, ...]
    labels: tuple[bool, ...] | None
    """Whether each is desirable; None without labels."""
    num_bytes: int


class ConversationReader:
    """Reads conversations, and renders them by a chat template, with counts of what was read."""

    def __init__(self, data: ConversationsSpec, template: ChatTemplate) -> None:
        self._data, self._template = data, template
        self._is_pair, self._has_labels = isinstance(data, PreferenceSpec), isinstance(data, UnpairedPreferenceSpec)
        self._answers_per_record: int | None = None
        """Number of answers of the first labelled record: all must have as many."""
        self._ways = set[bool]()
        self.counts = Counter[str]()
        self._unread = set[str]()

    def clear(self) -> None:
        """Forget the counts, before a new pass."""
        self.counts.clear()
        self._unread.clear()

    def facts(self) -> dict[str, Any]:
        """Records read and tokens learned, for statistics."""
        names = ("conversations", "apart", "rows_apart", *NOTES)
        labels = {"labels": {name: self.counts[name] for name in ("desirable", "undesirable")}}
        return {
            **(labels if self._has_labels else {}),
            "learned_by": " or ".join(_WAYS[way] for way in sorted(self._ways)),
            "written": {name: self.counts[name] for name in names}, "unread": sorted(self._unread)[:_MAX_UNREAD],
        }  # fmt: skip

    def documents(self, source: str, entries: Iterable[ConversationEntry], faults: Faults) -> Iterator[SourceDocument]:
        """Rendered conversations of a source; those that the template refuses are added to `faults`."""
        counts = self.counts
        rejected = list[SourceDocument]()
        """Rejected answers of pairs with labels, which follow the chosen ones of many pairs, as in TRL: neighbours have
        different prompts."""
        for entry, renderings in self.renderings(entries, faults):
            counts["conversations"] += 1
            is_held_out = self.is_held_out(entry)
            for rendering, is_desirable in zip(renderings, entry.labels or (None,) * len(renderings), strict=True):
                counts["apart"] += len(rendering.rows) > 1
                counts["rows_apart"] += len(rendering.rows) if len(rendering.rows) > 1 else 0
                counts.update(rendering.notes)
                if is_desirable is not None:
                    counts["desirable" if is_desirable else "undesirable"] += 1
                for row in rendering.rows:
                    self._ways.add(row.by_marks)
                    document = SourceDocument(
                        source, as_characters(row.text), is_held_out, row.spans, row.by_marks, is_desirable,
                        row.role_spans,
                    )  # fmt: skip
                    if len(renderings) == 2 and is_desirable is False:
                        rejected.append(document)
                    else:
                        yield document
            if len(rejected) >= _CHUNK:
                yield from rejected
                rejected.clear()
        yield from rejected

    def entries(
        self, files: Iterable[DataFile], faults: Faults, limit_bytes: int | None = None
    ) -> Iterator[ConversationEntry]:
        """Readable records of files, in order; others are added to `faults`. Limits and errors are those of
        `RecordReader.records`."""
        for file in files:
            for position, row, num_bytes in conversation_reader(file).records(file, faults, limit_bytes):
                if len(self._unread) < _MAX_UNREAD:
                    self._unread |= row.keys() - _READ
                try:
                    conversations, labels = self._conversations_of(row)
                except UnreadableRecord as error:
                    faults.add(file.broken("invalid_value", error.rule, error.remedy, position))
                else:
                    yield ConversationEntry(file, position, conversations, labels, num_bytes)

    def _conversations_of(self, row: Mapping[str, Any]) -> tuple[tuple[Conversation, ...], tuple[bool, ...] | None]:
        """(conversations, their labels if they have some) of a record. Raises UnreadableRecord."""
        if not self._has_labels:
            return (pair_of(row) if self._is_pair else (conversation_of(row),)), None
        conversations, labels = zip(*labelled_of(row), strict=True)
        self._answers_per_record = self._answers_per_record or len(labels)
        if len(labels) != self._answers_per_record:
            kinds = {1: "an answer with a label", 2: "a pair of answers"}
            rule = f"is {kinds[len(labels)]}, but earlier records are {kinds[self._answers_per_record]} each"
            raise UnreadableRecord(rule, "use records of one kind: submit a job for each, or convert them")
        return conversations, labels

    def renderings(
        self, entries: Iterable[ConversationEntry], faults: Faults
    ) -> Iterator[tuple[ConversationEntry, tuple[Rendering, ...]]]:
        """Yield each entry with its renderings; an entry that the template refuses is added to `faults`."""
        num_refused = 0
        for chunk in chunks(entries, _rendered_bytes, _CHUNK_BYTES, _CHUNK):
            remaining = chunk
            while remaining:
                renderings = self._template.render_rows(
                    [
                        replace(conversation, has_role_spans=self.is_held_out(entry))
                        for entry in remaining
                        for conversation in entry.conversations
                    ]
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
        if not (self._is_pair or self._has_labels) or len(rendering.rows) == 1:
            return None
        rule = f"renders as {len(rendering.rows)} rows, since its earlier answers change when more messages follow"
        remedy = "make 'chosen' and 'rejected' one answer each, after the same messages"
        return UnreadableRecord(rule, remedy if self._is_pair else "make the part to learn one answer")

    def is_held_out(self, entry: ConversationEntry) -> bool:
        """Whether a record is held out, by a hash of the messages before its first answer."""
        conversation = entry.conversations[0]
        prompt = json.dumps(conversation.messages[: conversation.first_answer], sort_keys=True, default=str)
        return is_held_out(prompt, self._data.held_out, _KEY)


def _rendered_bytes(entry: ConversationEntry) -> int:
    """Approximate bytes to render: a record's bytes once for each message."""
    return entry.num_bytes * sum(len(conversation.messages) for conversation in entry.conversations)
