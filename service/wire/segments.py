"""Sealed segments on a job's storage: small files that never change."""

import io
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from moe.storage.folder import FileTooLarge, Folder
from service.wire.events import SealedRecord

_SEGMENT = re.compile(r"segment-(\d{8,})\.(?:log|jsonl)")
_WRITER = re.compile(r"a(?P<attempt>[1-9]\d*)\.(?:(?P<driver>driver)|g(?P<group>\d+)(?:\.rank-(?P<rank>\d+))?)")

MAX_BYTES = 1 << 26
"""Most bytes read of a segment, which has a megabyte, or more if storage hung."""


@dataclass(frozen=True, order=True)
class WriterFolder:
    """The segments of one writer: `a1.g0.rank-3`, `a2.driver`."""

    attempt: int
    group: int
    """-1 for the driver, which sorts before its groups."""
    rank: int
    name: str

    @property
    def record_writer(self) -> str:
        """Writer name as in records."""
        return "driver" if self.group < 0 else f"group-{self.group}"


@dataclass(frozen=True)
class Segment:
    number: int
    path: str
    """Path in the folder of its kind."""
    num_bytes: int


class SegmentFolder:
    """One kind of a job's segments (`logs`, `metrics`). Links are ignored: runs make none. Raises OSError when
    storage cannot be read."""

    def __init__(self, storage: Folder, kind: str) -> None:
        self._folder = storage.subfolder(kind)

    def writers(self) -> list[WriterFolder]:
        """Writers in order of attempt, group and rank."""
        folders = []
        for name in self._folder.sizes():
            if match := _WRITER.fullmatch(name):
                group = -1 if match["driver"] else int(match["group"])
                folders.append(WriterFolder(int(match["attempt"]), group, int(match["rank"] or 0), name))
        return sorted(folders)

    def segments(self, writer: WriterFolder, first: int = 0) -> list[Segment]:
        """Segments from number `first` on, in order."""
        segments = []
        for name, num_bytes in self._folder.sizes(writer.name).items():
            match = _SEGMENT.fullmatch(name)
            if match and int(match[1]) >= first:
                segments.append(Segment(int(match[1]), f"{writer.name}/{name}", num_bytes))
        return sorted(segments, key=lambda segment: segment.number)

    def probe(self) -> None:
        """Test whether storage can be written. Raises OSError if not."""
        self._folder.write(".probe", b"")
        self._folder.remove(".probe")

    def read(self, segment: Segment, start: int, end: int) -> bytes:
        """Bytes of a segment. Raises FileTooLarge for more than `MAX_BYTES`."""
        return self._folder.read(segment.path, start, min(end, segment.num_bytes), MAX_BYTES)

    def records(self, writer: WriterFolder, since_seq: int = 0) -> Iterator[SealedRecord]:
        """A writer's records from `since_seq` on, up to the first damaged line."""
        for segment in self._segments_since(writer, since_seq):
            try:
                lines = self.lines(segment)
            except FileTooLarge:
                return  # as for a damaged line
            for line in lines:
                try:
                    record = SealedRecord.model_validate_json(line)
                except ValidationError:
                    return  # after a damaged line, sequence numbers are uncertain
                if record.seq >= since_seq:
                    yield record

    def lines(self, segment: Segment) -> io.BytesIO:
        """Lines of a segment, split lazily: untrusted ones may have millions. Raises FileTooLarge."""
        return io.BytesIO(self.read(segment, 0, segment.num_bytes))

    def _segments_since(self, writer: WriterFolder, since_seq: int) -> list[Segment]:
        """The last segments that may hold records from `since_seq` on."""
        segments = self.segments(writer)
        first = len(segments)
        while first > 0:
            first -= 1
            segment = segments[first]
            with suppress(ValidationError, FileTooLarge):
                if SealedRecord.model_validate_json(self.lines(segment).readline()).seq <= since_seq:
                    break
        return segments[first:]
