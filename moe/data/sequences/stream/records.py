"""Records of a stream's sources, and the documents that they become."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from moe.data.conversations.template import ChatTemplate
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.locations import Locator
from moe.data.readers.kinds import table_format, table_kind
from moe.data.sequences.chat_sources import chat_sources
from moe.data.sequences.conversation_reader import KEYS, ConversationEntry, ConversationReader
from moe.data.sequences.corpus import SourceDocument
from moe.data.sequences.documents import files_by_source, is_held_out_document
from moe.data.sequences.formats import DocumentReader
from moe.data.text import as_characters
from moe.spec import ChatSpec, DocumentsSpec, StreamableSpec
from moe.spec.data_files import Format

R = TypeVar("R")


class StreamedFiles(NamedTuple):
    """Files of one source of a stream."""

    format: Format | None
    """Format of documents; None for conversations."""
    files: list[DataFile]


def streamed_files(data: StreamableSpec, locator: Locator) -> list[StreamedFiles]:
    """Files of each source, in order; a file belongs to the first source and path that names it. Raises SpecError."""
    if isinstance(data, DocumentsSpec):
        return [StreamedFiles(source.format, source.files) for source in files_by_source(data, locator)]
    return [StreamedFiles(source.format, source.files) for source in chat_sources(data, locator)]


def files_place(data: StreamableSpec, index: int) -> str:
    """Path in the spec of the field that names the files of a source."""
    if data.sources is None:
        return f"data.{data.files_field}"
    return f"data.sources[{index}].{data.sources[index].files_field}"


class RecordSource(ABC, Generic[R]):
    """Reads the records of one source, in order, and makes documents of them. A record is cheap to read; a conversation
    becomes a document only when it is rendered."""

    @abstractmethod
    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[R]:
        """Records of a file. Limits and errors are those of `RecordReader.records`."""

    @abstractmethod
    def text_bytes(self, record: R) -> int:
        """Bytes of a record's text in UTF-8; 0 for one without text, which is left out."""

    @abstractmethod
    def is_held_out(self, record: R) -> bool:
        """Whether a record is held out for evaluation."""

    @abstractmethod
    def documents(self, records: Iterable[R], faults: Faults) -> Iterator[SourceDocument]:
        """Documents of records; records that have none are added to `faults`."""

    @abstractmethod
    def table_format(self, file: DataFile) -> Format | None:
        """Format of a file with columns; None for others."""

    @abstractmethod
    def has_text(self, column: str) -> bool:
        """Whether a column of Parquet or Arrow files, given as `a.b` if nested, is part of the text."""


class TextRecords(RecordSource[str]):
    """Documents: each is the text of a record."""

    def __init__(self, name: str, format: Format, column: str, place: str, held_out: float) -> None:
        """`place`: path of the source in the spec; `held_out`: share of documents."""
        self._name, self._format, self._column, self._held_out = name, format, column, held_out
        self._reader = DocumentReader(format, column, place)

    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[str]:
        return map(as_characters, self._reader.texts(file, faults, limit_bytes))

    def text_bytes(self, record: str) -> int:
        return len(record.encode()) if record.strip() else 0

    def is_held_out(self, record: str) -> bool:
        return is_held_out_document(record, self._held_out)

    def documents(self, records: Iterable[str], faults: Faults) -> Iterator[SourceDocument]:
        return (SourceDocument(self._name, record, self.is_held_out(record)) for record in records)

    def table_format(self, file: DataFile) -> Format | None:
        return self._format if table_kind(self._format) is not None else None

    def has_text(self, column: str) -> bool:
        return column == self._column


class ConversationRecords(RecordSource[ConversationEntry]):
    """Conversations, rendered by a chat template."""

    def __init__(self, name: str, reader: ConversationReader) -> None:
        self._name, self._reader = name, reader

    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[ConversationEntry]:
        return self._reader.entries([file], faults, limit_bytes)

    def text_bytes(self, record: ConversationEntry) -> int:
        """Bytes of the messages and tools as JSON, whatever kind of file they are read from."""
        parts = [[conversation.messages, conversation.tools] for conversation in record.conversations]
        return len(json.dumps(parts, ensure_ascii=False, default=str).encode("utf-8", "replace"))

    def is_held_out(self, record: ConversationEntry) -> bool:
        return self._reader.is_held_out(record)

    def documents(self, records: Iterable[ConversationEntry], faults: Faults) -> Iterator[SourceDocument]:
        return self._reader.documents(self._name, records, faults)

    def table_format(self, file: DataFile) -> Format | None:
        return table_format(file)

    def has_text(self, column: str) -> bool:
        return column.partition(".")[0] in KEYS


class RecordSources:
    """Sources of a stream by their indices."""

    def __init__(self, data: StreamableSpec, template: ChatTemplate | None = None) -> None:
        """`template`: chat template of conversations, which are only read without one."""
        self._data = data
        self.conversations: ConversationReader | None = None
        """Reader of the conversations of all sources, with their counts; None for documents."""
        if isinstance(data, ChatSpec):
            self.conversations = ConversationReader(data, template or ChatTemplate({}, {}))

    def source(self, index: int, format: Format | None) -> RecordSource[Any]:
        """Source of files of this format, as of `StreamedFiles`."""
        name = self._data.source_names[index]
        if format is None:
            assert self.conversations is not None
            return ConversationRecords(name, self.conversations)
        assert self._data.sources is not None
        column = self._data.sources[index].column
        return TextRecords(name, format, column, f"data.sources[{index}]", self._data.held_out)
