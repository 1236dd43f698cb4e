"""Sealed segments on a job's storage: small files that are whole when they appear and never change."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from moe import beneath
from service.report.events import SealedRecord

_SEGMENT = re.compile(r"segment-(\d{8,})\.(?:log|jsonl)")
_WRITER = re.compile(
    r"a(?P<attempt>[1-9]\d*)\.(?:(?P<driver>driver)|g(?P<group>\d+)(?:\.rank-(?P<rank>\d+))?)"
)


@dataclass(frozen=True, order=True)
class WriterFolder:
    """The segments of one writer: `a1.g0.rank-3`, `a2.driver`."""

    attempt: int
    group: int
    """-1 for the driver, which comes before its groups."""
    rank: int
    name: str

    @property
    def record_writer(self) -> str:
        """The writer by the name that records carry."""
        return "driver" if self.group < 0 else f"group-{self.group}"


@dataclass(frozen=True)
class Segment:
    number: int
    path: str
    num_bytes: int


class SegmentFolder:
    """One kind of segments (`logs`, `metrics`) of one job. Raises OSError when storage cannot be read.

    On a file system nothing outside the folder is read, whatever links are put there.
    """

    def __init__(self, storage: str, kind: str) -> None:
        self._files: Any
        self._files, self._storage = fsspec.core.url_to_fs(storage)
        self._root = f"{self._storage}/{kind}"
        self._is_local = isinstance(self._files, LocalFileSystem)

    def writers(self) -> list[WriterFolder]:
        """In order of attempt, group and rank."""
        found = []
        for entry in self._list(self._root):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if match := _WRITER.fullmatch(name):
                group = -1 if match["driver"] else int(match["group"])
                found.append(WriterFolder(int(match["attempt"]), group, int(match["rank"] or 0), name))
        return sorted(found)

    def segments(self, writer: WriterFolder, first: int = 0) -> list[Segment]:
        """From number `first` on, in order."""
        found = []
        for entry in self._list(f"{self._root}/{writer.name}"):
            match = _SEGMENT.fullmatch(entry["name"].rpartition("/")[2])
            if match and int(match[1]) >= first:
                found.append(Segment(int(match[1]), entry["name"], int(entry["size"] or 0)))
        return sorted(found, key=lambda segment: segment.number)

    def probe(self) -> None:
        """Raises OSError when storage cannot be written."""
        path = f"{self._root}/.probe"
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(path, b"")
        self._files.rm_file(path)

    def read(self, segment: Segment, start: int, end: int) -> bytes:
        end = min(end, segment.num_bytes)
        if self._is_local:
            with beneath.open_file(self._storage, segment.path) as file:
                file.seek(start)
                return file.read(end - start)
        data: bytes = self._files.cat_file(segment.path, start=start, end=end)
        return data

    def records(self, writer: WriterFolder, since_seq: int = 0) -> Iterator[SealedRecord]:
        """A writer's records from `since_seq` on, as far as their lines can be read."""
        for segment in self._segments_since(writer, since_seq):
            for line in self.read(segment, 0, segment.num_bytes).splitlines():
                try:
                    record = SealedRecord.model_validate_json(line)
                except ValidationError:
                    return  # what follows a damaged line has lost its place in the sequence
                if record.seq >= since_seq:
                    yield record

    def _segments_since(self, writer: WriterFolder, since_seq: int) -> list[Segment]:
        """The writer's last segments, those that may hold records from `since_seq` on: of a long run, few."""
        segments = self.segments(writer)
        first = len(segments)
        while first > 0:
            first -= 1
            segment = segments[first]
            line, _, _ = self.read(segment, 0, segment.num_bytes).partition(b"\n")
            with suppress(ValidationError):
                if SealedRecord.model_validate_json(line).seq <= since_seq:
                    break
        return segments[first:]

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            if self._is_local:
                there = beneath.sizes(self._storage, path)  # runs make no links: others' are passed over
                return [{"name": f"{path}/{name}", "size": size} for name, size in there.items()]
            # Object stores remember listings; new segments have to be seen.
            self._files.invalidate_cache(path)
            entries: list[dict[str, Any]] = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError, beneath.Outside):
            return []
        return entries
