"""Sources of the corpora `chat` and `preference`: files of conversations, or of documents beside them."""

from collections.abc import Iterator
from typing import NamedTuple

from moe.data.data_file import DataFile
from moe.data.dataset_folder import locate_source
from moe.data.faults import Faults
from moe.data.locations import Location, Locator
from moe.data.sequences.corpus import DocumentSource
from moe.data.sequences.formats import DocumentReader
from moe.spec import ChatSpec, ConversationsSpec, spec_error
from moe.spec.conversations import CONVERSATIONS, ChatSourceSpec
from moe.spec.data_files import Format
from moe.spec.sequences import file_format


class ChatSource(NamedTuple):
    """Files of one source."""

    name: str
    weight: float
    files_place: str
    """Path in the spec of the field that names its files."""
    files: list[DataFile]
    documents: DocumentReader | None
    """Reader of documents; None for conversations."""
    format: Format | None
    """Format of documents; None for conversations."""

    @property
    def places(self) -> str:
        """Names of its first files, for messages."""
        return ", ".join(str(file.location) for file in self.files[:3])

    def texts(self, faults: Faults) -> Iterator[str]:
        """Documents, unprocessed."""
        assert self.documents is not None
        for file in self.files:
            yield from self.documents.texts(file, faults)


def chat_sources(data: ConversationsSpec, locator: Locator) -> list[ChatSource]:
    """Sources of a spec; a file belongs to the first one that names it. Raises SpecError."""
    if data.sources is None:
        files = locate_source(locator, "data", data)[1]
        return [ChatSource(CONVERSATIONS, 1.0, f"data.{data.files_field}", files, None, None)]
    seen_locations: set[Location] = set()
    sources = []
    for index, (name, spec) in enumerate(zip(data.source_names, data.sources, strict=True)):
        place = f"data.sources[{index}]"
        format, files = locate_source(locator, place, spec, seen_locations)
        files_place = f"{place}.{spec.files_field}"
        if not files:
            rule = "names only files of earlier sources"
            raise spec_error("duplicate", files_place, None, rule, "remove the source")
        documents = None
        if isinstance(spec, ChatSourceSpec) and spec.corpus == "documents":
            format = format or file_format(spec.paths, spec.format) or "jsonl"
            documents = DocumentReader(format, spec.column, place)
        documents_format = None if documents is None else format
        sources.append(ChatSource(name, spec.weight, files_place, files, documents, documents_format))
    return sources


def training_sources(data: ConversationsSpec) -> tuple[DocumentSource, ...]:
    """Sources of a spec by name and weight, without their files."""
    return tuple(DocumentSource(name, weight) for name, weight in data.source_weights.items())


def packing_of(data: ConversationsSpec) -> str:
    """Packing of texts into sequences, as in `ChatSpec.packing`."""
    return data.packing if isinstance(data, ChatSpec) else "by_source"
