"""Shards: the files of a stream, listed when it begins, with their versions."""

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from moe.data.compression import DAMAGED, decompress
from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.locations import FileVersion, Location, Locator, NoFile
from moe.data.readers.arrow_files import ArrowFiles
from moe.data.sequences.stream.records import RecordSource, RecordSources, streamed_files
from moe.spec import SpecError, StreamableSpec, spec_error
from moe.spec.data_files import Format

T = TypeVar("T")
_GONE, _RESTORE = "does not exist any more", "restore it and resume the job, or submit a new job without it"
_MAX_MEASURED_FILES = 3
"""Files of each source from which its text per stored byte is estimated."""
_MEASURED_BYTES, _MIN_MEASURED_BYTES = 32 << 20, 1 << 20
"""Bytes that are read of all these files together, and at least of each."""


@dataclass(frozen=True)
class Shard:
    """A file of a stream."""

    file: DataFile
    version: FileVersion
    """Version of the file when the stream began."""

    def require_unchanged(self) -> None:
        """Raise SpecError if the file has another version now. Raises OSError if it cannot be found."""
        version = self.file.location.version(fresh=True)
        if version != self.version:
            rule = "has changed since the stream began: "
            if version.size_bytes != self.version.size_bytes:
                rule += f"it had {self.version.size_bytes:,} bytes, and has {version.size_bytes:,}"
            else:
                rule += f"it has as many bytes, but another version ({version.name.partition(' ')[0]})"
            raise self.file.broken("changed", rule, "restore that version and resume the job, or submit a new job")

    def vanished(self) -> SpecError:
        """Error of a file that was there when the stream began."""
        return self.file.broken("not_found", _GONE, _RESTORE)


@dataclass(frozen=True)
class ShardsOfSource:
    """Shards of one source, in the order in which its paths name them."""

    format: Format | None
    """Format of documents; None for conversations."""
    shards: tuple[Shard, ...]
    text_per_byte: float
    """Bytes of text per stored byte, estimated from the beginnings of some files."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all files, as they are stored."""
        return sum(shard.version.size_bytes for shard in self.shards)


@dataclass(frozen=True)
class ShardList:
    """Shards of all sources of a stream, in the order of the spec."""

    sources: tuple[ShardsOfSource, ...]

    @classmethod
    def of_spec(cls, data: StreamableSpec, roots: Sequence[str] | None) -> "ShardList":
        """List the files that a spec's paths name now. Raises SpecError."""
        sources, record_sources = [], RecordSources(data)
        limit_bytes = max(_MIN_MEASURED_BYTES, _MEASURED_BYTES // (_MAX_MEASURED_FILES * len(data.source_names)))
        for index, (format, files) in enumerate(streamed_files(data, Locator(roots))):
            shards = tuple(Shard(file, _version_of(file)) for file in files)
            text_per_byte = _text_per_byte(record_sources.source(index, format), shards, limit_bytes)
            sources.append(ShardsOfSource(format, shards, text_per_byte))
        return cls(tuple(sources))

    @classmethod
    def from_bytes(cls, content: bytes, roots: Sequence[str] | None) -> "ShardList":
        """List that `to_bytes` wrote. Raises SpecError for a file that does not lie under `roots` any more, or a local
        one that is gone; remote ones are looked up when they are read."""
        locator, sources = Locator(roots, max_names=sys.maxsize), list[ShardsOfSource]()  # listed before, with a limit
        for source in json.loads(gzip.decompress(content)):
            shards = []
            for place, url, size_bytes, name in source["shards"]:
                try:
                    location = locator.relocate(place, url)
                except NoFile:
                    raise spec_error("not_found", place, url, _GONE, _RESTORE) from None
                shards.append(Shard(DataFile(place, location), FileVersion(size_bytes, name)))
            sources.append(ShardsOfSource(source["format"], tuple(shards), source["text_per_byte"]))
        return cls(tuple(sources))

    def to_bytes(self) -> bytes:
        """The list as compressed JSON, the same for the same list."""
        return gzip.compress(self._json(), mtime=0)

    def fingerprint(self) -> str:
        """Hash of all names and versions."""
        return hashlib.sha256(self._json()).hexdigest()

    def __iter__(self) -> Iterator[Shard]:
        return (shard for source in self.sources for shard in source.shards)

    def _json(self) -> bytes:
        plain = [
            {
                "format": source.format,
                "text_per_byte": source.text_per_byte,
                "shards": [[shard.file.place, str(shard.file.location), *shard.version] for shard in source.shards],
            }
            for source in self.sources
        ]
        return json.dumps(plain).encode()


def spread(files: Sequence[T], max_number: int) -> list[T]:
    """Files at even distances, at most `max_number`."""
    number = min(max_number, len(files))
    return [files[index * len(files) // number] for index in range(number)]


def _version_of(file: DataFile) -> FileVersion:
    try:
        return file.location.version()
    except OSError as error:
        raise file.unreadable(error) from None


def _text_per_byte(source: RecordSource[Any], shards: Sequence[Shard], limit_bytes: int) -> float:
    """Bytes of text per stored byte, to two digits: other versions of a library read slightly further ahead."""
    num_text = num_stored = 0
    for shard in spread(shards, _MAX_MEASURED_FILES):
        with suppress(SpecError, OSError, ValueError):  # which reading raises again, with its place
            text, stored = _text_and_stored_bytes(source, shard, limit_bytes)
            num_text, num_stored = num_text + text, num_stored + stored
    return float(f"{num_text / num_stored:.2g}") if num_text and num_stored else 1.0


def _text_and_stored_bytes(source: RecordSource[Any], shard: Shard, limit_bytes: int) -> tuple[int, int]:
    """(bytes of text, bytes as stored) of a file, or of its first `limit_bytes` of content."""
    location, format = shard.file.location, source.table_format(shard.file)
    if format == "parquet":
        import pyarrow.parquet

        with location.raw() as raw, pyarrow.parquet.ParquetFile(raw) as parquet_file:
            metadata = parquet_file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            parts = [group.column(number) for group in groups for number in range(group.num_columns)]
            text = sum(part.total_uncompressed_size for part in parts if source.has_text(part.path_in_schema))
        return text, shard.version.size_bytes
    num_text = num_stored = 0
    if format == "arrow":
        with ArrowFiles().open(shard.file) as table:
            for batch in table.batches(table.schema.names):
                num_text += sum(batch.column(name).nbytes for name in batch.schema.names if source.has_text(name))
                num_stored += batch.nbytes
                if num_stored >= limit_bytes:
                    break
        return num_text, num_stored
    for record in source.records(shard.file, Faults(skips=True, max_share=1.0), limit_bytes):
        num_text += source.text_bytes(record)
    return num_text, _stored_bytes(location, limit_bytes)


def _stored_bytes(location: Location, limit_bytes: int) -> int:
    """Stored bytes that hold the first `limit_bytes` of a file's content."""
    try:
        with location.raw() as raw:
            content = decompress(raw)
            if content is None:
                return len(raw.read(limit_bytes))
            with content:
                content.read(limit_bytes)
                return raw.tell()
    except DAMAGED:
        return 0
