"""Records on the node's own disk first: an append that outlives the process, sealed on storage in pieces.

A writer has a folder of numbered segments. Lines are appended to the newest; the others are complete. A
complete segment is sealed by copying it to the job's storage, and removed here once nobody needs it. Every
line lies in the operating system's hands when `append` returns, so that killing the process loses none.
"""

import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from moe.storage.folder import Folder

SEGMENT_MOST_BYTES = 1_000_000
_SEGMENT = re.compile(r"segment-(\d{8,})\.(?:jsonl|log)(\.sealed)?")


def spool_folder(job_id: str) -> Path:
    """The folder on this node for what one job's processes write, readable by this user only.

    Raises PermissionError if somebody else made it first.
    """
    base = Path(tempfile.gettempdir()) / f"shardyard-spool-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{base} must be a folder that only user {os.getuid()} can read; remove it")
    folder = base / job_id
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class Spool:
    """One writer's segments on this node: appended to by threads of one process, read by its sender.

    `suffix` is `jsonl` for records and `log` for lines of text.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder, self._suffix = folder, suffix
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        last = max((segment.number for segment in self.segments()), default=-1)
        self._number = last + 1
        self._file: int | None = None
        self._bytes = 0
        self._opened_at = 0.0
        self._next_line = 0

    def append(self, render: Callable[[int], bytes]) -> None:
        """Adds the line that `render` makes of its number, counted from 0; it is kept when this returns.

        Raises OSError when the disk takes no more: then it is as if nothing had been added.
        """
        with self._lock:
            line = render(self._next_line)
            if self._file is None:
                self._file = self._open()
                self._opened_at = time.monotonic()
            try:
                _write_all(self._file, line)
            except OSError:
                os.ftruncate(self._file, self._bytes)
                raise
            self._bytes += len(line)
            self._next_line += 1

    @property
    def num_lines(self) -> int:
        """Lines appended so far; the number of the next."""
        return self._next_line

    def roll(self, age_s: float = 0.0) -> None:
        """Completes the newest segment if it is at least this old, or large."""
        with self._lock:
            if self._file is None:
                return
            if time.monotonic() - self._opened_at >= age_s or self._bytes >= SEGMENT_MOST_BYTES:
                os.close(self._file)
                self._file, self._bytes = None, 0
                self._number += 1

    def segments(self) -> list["LocalSegment"]:
        """Segments that lie here, in order."""
        return local_segments(self.folder)

    def complete(self) -> list["LocalSegment"]:
        """The segments that nothing is added to any more."""
        with self._lock:
            writing = self._number
        return [segment for segment in self.segments() if segment.number < writing]

    def _open(self) -> int:
        path = self.folder / f"segment-{self._number:08d}.{self._suffix}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # a process that ended has cleared away what was empty
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)


class LocalSegment:
    """A segment's file on this node."""

    def __init__(self, path: Path, number: int, sealed: bool) -> None:
        self.path, self.number, self.sealed = path, number, sealed

    @property
    def name(self) -> str:
        """As it is called on storage."""
        return self.path.name.removesuffix(".sealed")

    def whole_lines(self, start: int = 0, max_bytes: int | None = None) -> bytes:
        """Bytes from `start` on, without a last line that was cut short."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:  # another thread has sealed it meanwhile, or done away with it
            try:
                file = self._sealed_path.open("rb")
            except FileNotFoundError:
                return b""
        with file:
            file.seek(start)
            data = file.read() if max_bytes is None else file.read(max_bytes)
            if max_bytes is not None and b"\n" not in data:
                data += file.readline()  # one line longer than was asked for
        return data[: data.rfind(b"\n") + 1]

    def mark_sealed(self) -> None:
        if not self.sealed:
            self.path.rename(self._sealed_path)
            self.path, self.sealed = self._sealed_path, True

    @property
    def _sealed_path(self) -> Path:
        return self.path.with_name(f"{self.name}.sealed")


class Seals:
    """A writer's folder on the job's storage, to which complete segments are copied.

    Raises OSError when storage cannot be written; the segments stay, and are sealed another time.
    """

    def __init__(self, storage: str, kind: str, writer: str) -> None:
        self._folder = Folder.of_job(storage).below(f"{kind}/{writer}")

    def seal(self, segment: LocalSegment) -> None:
        """Copies a complete segment, whole or not at all, and notes that on this node."""
        if segment.sealed:
            return
        if data := segment.whole_lines():
            self._folder.write(segment.name, data)
        segment.mark_sealed()


def local_segments(folder: Path) -> list[LocalSegment]:
    """The segments in a writer's folder, in order; none where it is missing."""
    found = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    for name in names:
        if match := _SEGMENT.fullmatch(name):
            found.append(LocalSegment(folder / name, int(match[1]), match[2] is not None))
    return sorted(found, key=lambda segment: segment.number)


def writer_folders(job_folder: Path, kind: str) -> Iterator[Path]:
    """Folders of a job's writers of this kind (`metrics`, `logs`) on this node, by name."""
    try:
        names = sorted(os.listdir(job_folder / kind))
    except FileNotFoundError:
        return
    yield from (job_folder / kind / name for name in names)


def tidy(job_folder: Path, keep_sealed: bool = True) -> None:
    """Removes a job's empty folders on this node, and the segments that storage has, unless they are kept."""
    for kind in ("logs", "metrics"):
        for folder in list(writer_folders(job_folder, kind)):
            for segment in local_segments(folder):
                if segment.sealed and not keep_sealed:
                    segment.path.unlink(missing_ok=True)
            _remove_if_empty(folder)
        _remove_if_empty(job_folder / kind)
    _remove_if_empty(job_folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # others still write there
        folder.rmdir()


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
