"""Spool of records and log lines on the node's disk, sealed on storage by segment.

A writer has numbered segments. Lines are appended to the newest; complete ones are copied to the job's storage
(sealed), and removed here once unneeded. When `append` returns, the operating system has the line, so that SIGKILL
loses none.

The folder may be removed, renamed, unreadable or full at any time. Files stay open until sealed, and so readable;
lines that no file accepts wait in memory.
"""

import errno
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from moe.storage.folder import Folder
from service.run.log_limit import NewestSegments
from service.wire.node_folder import make_private

SEGMENT_MOST_BYTES = 1_000_000
MEMORY_MOST_BYTES = 32_000_000
"""Most bytes of a writer's lines in memory."""
MAX_HELD_FILES = 64
"""Unsealed segments kept open, in case their files are removed."""
_SEGMENT = re.compile(r"segment-(\d{8,})\.(?:jsonl|log)(\.sealed)?")


class LocalSegment(ABC):
    """A numbered segment of a writer's output on this node."""

    def __init__(self, number: int, is_sealed: bool) -> None:
        self.number, self.is_sealed = number, is_sealed

    @property
    @abstractmethod
    def name(self) -> str:
        """Name on storage."""

    @abstractmethod
    def read(self, start: int = 0, max_bytes: int | None = None) -> bytes:
        """Bytes from `start` on; empty if gone. Raises OSError if unreadable."""

    @abstractmethod
    def note_sealed(self, seals: "Seals") -> None:
        """Mark as completely copied to storage."""

    @abstractmethod
    def remove(self) -> None:
        """Remove it from this node."""

    def whole_lines(self, start: int = 0, max_bytes: int | None = None) -> bytes:
        """Bytes from `start` on, without an incomplete last line."""
        data = self.read(start, max_bytes)
        while max_bytes is not None and b"\n" not in data and len(data) == max_bytes:
            max_bytes *= 2  # a line longer than `max_bytes`
            data = self.read(start, max_bytes)
        return data[: data.rfind(b"\n") + 1]


class SegmentFile(LocalSegment):
    """Segment of a dead process, known by its path."""

    def __init__(self, path: Path, number: int, is_sealed: bool) -> None:
        super().__init__(number, is_sealed)
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".sealed")

    def read(self, start: int = 0, max_bytes: int | None = None) -> bytes:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if max_bytes is None else max_bytes)
        return b""

    def note_sealed(self, seals: "Seals") -> None:
        sealed_path = self.path.with_name(f"{self.name}.sealed")
        with suppress(FileNotFoundError):
            self.path.rename(sealed_path)
        self.path, self.is_sealed = sealed_path, True

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class _OwnSegment(LocalSegment):
    """Segment written by this process: an open file, or memory."""

    def __init__(self, number: int, path: Path, file: int | None) -> None:
        super().__init__(number, is_sealed=False)
        self._path, self._file = path, file
        self._memory = None if file is not None else bytearray()
        self._seals: Seals | None = None
        self._lock = threading.Lock()  # between reading a descriptor and closing it
        self.num_bytes = 0
        self.opened_at = time.monotonic()

    @property
    def name(self) -> str:
        return self._path.name.removesuffix(".sealed")

    @property
    def is_in_memory(self) -> bool:
        return self._memory is not None

    def append(self, line: bytes) -> None:
        """Add a line atomically. Raises OSError."""
        if self._memory is not None:
            self._memory += line
        else:
            assert self._file is not None
            try:
                _write_all(self._file, line)
            except OSError:
                os.ftruncate(self._file, self.num_bytes)
                raise
        self.num_bytes += len(line)

    def read(self, start: int = 0, max_bytes: int | None = None) -> bytes:
        num_bytes = self.num_bytes - start if max_bytes is None else min(max_bytes, self.num_bytes - start)
        if num_bytes <= 0:
            return b""
        with self._lock:
            if self._memory is not None:
                return bytes(self._memory[start : start + num_bytes])
            if self._file is not None:
                return os.pread(self._file, num_bytes, start)
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)
        # The file was removed after sealing, before its records were delivered.
        return self._seals.read(self.name)[start : start + num_bytes] if self._seals else b""

    def note_sealed(self, seals: "Seals") -> None:
        self._seals = seals
        sealed_path = self._path.with_name(f"{self.name}.sealed")
        with suppress(OSError):  # it may have been removed or renamed; storage has it
            self._path.rename(sealed_path)
        self._path, self.is_sealed = sealed_path, True
        self.close_file()

    def close_file(self) -> None:
        """Close the file, and free the memory if sealed."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if self.is_sealed:
                self._memory = None

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self.close_file()


class Spool:
    """A writer's segments: appended to by threads of one process, read by its sender.

    `suffix`: `jsonl` for records, `log` for text. `top`: folder below which all must be private; by default the
    parent.
    """

    def __init__(self, folder: Path, suffix: str, top: Path | None = None) -> None:
        self.folder, self._suffix, self._top = folder, suffix, top or folder.parent
        self.fault: OSError | None = None
        """Reason why new lines wait in memory; None if they do not."""
        self._lock = threading.Lock()
        self._old_segments: list[LocalSegment] = [*local_segments(folder)]  # of an earlier process of this name
        self._next_number = max((segment.number for segment in self._old_segments), default=-1) + 1
        self._new_segments: list[_OwnSegment] = []
        self._newest: _OwnSegment | None = None
        self._next_line = 0

    def append(self, render: Callable[[int], bytes]) -> None:
        """Append the line that `render` makes of its number, from 0; stored on return. Raises OSError, with nothing
        added, if disk and memory are full."""
        with self._lock:
            line = render(self._next_line)
            if self._newest is None:
                self._begin_segment()
            assert self._newest is not None
            if self._newest.is_in_memory:
                self._append_in_memory(line)
            else:
                try:
                    self._newest.append(line)
                except OSError as error:
                    self.fault = error
                    self._begin_segment(in_memory=True)
                    self._append_in_memory(line)
            self._next_line += 1

    @property
    def num_lines(self) -> int:
        """Lines appended so far: the number of the next."""
        return self._next_line

    def roll(self, age_s: float = 0.0) -> None:
        """Complete the newest segment if `age_s` old, or large."""
        with self._lock:
            newest = self._newest
            if newest is None:
                return
            old = time.monotonic() - newest.opened_at >= age_s
            if old or newest.num_bytes >= SEGMENT_MOST_BYTES:
                self._newest = None

    def segments(self) -> list[LocalSegment]:
        """Remaining segments, in order."""
        with self._lock:
            return [*self._old_segments, *self._new_segments]

    def complete(self) -> list[LocalSegment]:
        """Segments that are no longer appended to."""
        with self._lock:
            return [segment for segment in (*self._old_segments, *self._new_segments) if segment is not self._newest]

    def remove(self, segment: LocalSegment) -> None:
        """Remove a complete segment from this node."""
        segment.remove()
        with self._lock:
            self._old_segments = [candidate for candidate in self._old_segments if candidate is not segment]
            self._new_segments = [candidate for candidate in self._new_segments if candidate is not segment]

    def _begin_segment(self, *, in_memory: bool = False) -> None:
        path = self.folder / f"segment-{self._next_number:08d}.{self._suffix}"
        file = None
        if not in_memory:
            try:
                make_private(self._top, self.folder)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
                self.fault = None
            except OSError as error:
                self.fault = error
        self._newest = _OwnSegment(self._next_number, path, file)
        self._next_number += 1
        self._new_segments.append(self._newest)
        open_segments = [
            segment for segment in self._new_segments if not segment.is_sealed and not segment.is_in_memory
        ]
        for segment in open_segments[:-MAX_HELD_FILES]:
            segment.close_file()

    def _append_in_memory(self, line: bytes) -> None:
        assert self._newest is not None
        waiting = sum(segment.num_bytes for segment in self._new_segments if segment.is_in_memory)
        if waiting + len(line) > MEMORY_MOST_BYTES:
            raise self.fault or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._newest.append(line)


class Seals:
    """A writer's folder on storage. Raises OSError when storage cannot be written; segments are then sealed later."""

    def __init__(self, storage: str, kind: str, writer: str, max_bytes: int | None = None) -> None:
        """`max_bytes`: limit of all segments; the newest are kept."""
        self._folder = Folder.of_job(storage).subfolder(f"{kind}/{writer}")
        self._newest = None if max_bytes is None else NewestSegments(self._folder, max_bytes)

    def seal(self, segment: LocalSegment) -> None:
        """Copy a complete segment atomically, and mark it as sealed."""
        if segment.is_sealed:
            return
        if data := segment.whole_lines():
            if self._newest:
                self._newest.write(segment.name, data)
            else:
                self._folder.write(segment.name, data)
        segment.note_sealed(self)

    def read(self, name: str) -> bytes:
        """A sealed segment. Raises OSError when storage cannot be read."""
        return self._folder.read(name)


def local_segments(folder: Path) -> list[SegmentFile]:
    """Segments in a dead writer's folder, in order; empty if unreadable."""
    segments: list[SegmentFile] = []
    for name in _names(folder):
        if match := _SEGMENT.fullmatch(name):
            segments.append(SegmentFile(folder / name, int(match[1]), match[2] is not None))
    return sorted(segments, key=lambda segment: segment.number)


def writer_folders(job_folder: Path, kind: str) -> Iterator[Path]:
    """Folders of a job's writers of a kind (`metrics`, `logs`) on this node."""
    yield from (job_folder / kind / name for name in sorted(_names(job_folder / kind)))


def remove_sent_segments(job_folder: Path, keep_sealed: bool = True) -> None:
    """Remove a job's empty folders, and sealed segments unless `keep_sealed`."""
    for kind in ("logs", "metrics"):
        for folder in list(writer_folders(job_folder, kind)):
            for segment in local_segments(folder):
                if segment.is_sealed and not keep_sealed:
                    with suppress(OSError):
                        segment.remove()
            _remove_if_empty(folder)
        _remove_if_empty(job_folder / kind)
    _remove_if_empty(job_folder)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # removed, unreadable, or no longer a folder
        return []


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # others still write there
        folder.rmdir()


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
