"""Limit of a job's log (`logs.max_bytes`): half for running processes, in equal shares, half for past ones. Each
writer keeps its newest segments, with a line that says how much was removed."""

from collections import deque
from dataclasses import dataclass

from moe.storage.folder import Folder
from service.wire.segments import Segment, SegmentFolder, WriterFolder

TIME_CHARACTERS = len("2026-01-31T12:00:00.123456Z")


def share_of_writer(max_bytes: int, num_workers: int) -> int:
    """Log bytes that the driver, and each of its workers, may keep."""
    return max(1, max_bytes // 2 // (num_workers + 1))


def removed_line(time: str, num_bytes: int) -> bytes:
    """Log line in place of removed earlier lines."""
    return f"{time} warning {num_bytes:,} earlier bytes of this log were removed: logs.max_bytes\n".encode()


@dataclass(frozen=True)
class _SealedSegment:
    name: str
    num_bytes: int
    last_time: str
    """Timestamp of its last line."""


class NewestSegments:
    """Writes a writer's sealed segments, and removes the oldest beyond a limit."""

    def __init__(self, folder: Folder, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._segments: deque[_SealedSegment] = deque()
        self._notice = ""
        """Name of the segment that holds the removal line."""
        self._removed_bytes = 0

    def write(self, name: str, data: bytes) -> None:
        """Write a segment, cut to its newest lines within the limit, and remove the oldest segments. Raises OSError;
        the next call for the same segment then continues."""
        if not self._segments or self._segments[-1].name != name:
            self._write_newest_lines(name, data)
        while len(self._segments) > 1 and sum(segment.num_bytes for segment in self._segments) > self._max_bytes:
            oldest = self._segments[0]
            removed_bytes = self._removed_bytes + oldest.num_bytes
            self._folder.write(oldest.name, removed_line(oldest.last_time, removed_bytes))
            if self._notice:
                self._folder.remove(self._notice)
            self._segments.popleft()
            self._removed_bytes, self._notice = removed_bytes, oldest.name

    def _write_newest_lines(self, name: str, data: bytes) -> None:
        begin = data.find(b"\n", len(data) - self._max_bytes) + 1 if len(data) > self._max_bytes else 0
        removed_bytes = self._removed_bytes + begin
        if begin:
            data = removed_line(_time(data[:begin]), removed_bytes) + data[begin:]
        self._folder.write(name, data)
        self._removed_bytes = removed_bytes
        self._segments.append(_SealedSegment(name, len(data), _time(data)))


def remove_oldest(storage: str, attempt: int, num_dead_groups: int, max_bytes: int) -> None:
    """Trim the logs of past attempts and dead worker groups to half of the limit. Raises OSError."""
    logs = Folder.of_job(storage).subfolder("logs")
    folder = SegmentFolder(Folder.of_job(storage), "logs")
    past = [
        (writer, segment)
        for writer in folder.writers()
        if writer.attempt < attempt or (writer.attempt == attempt and 0 <= writer.group < num_dead_groups)
        for segment in folder.segments(writer)
    ]
    surplus = sum(segment.num_bytes for _, segment in past) - max_bytes // 2
    removals: dict[WriterFolder, tuple[int, list[Segment]]] = {}
    for writer, segment in past:
        if surplus <= 0:
            break
        surplus -= segment.num_bytes
        num_bytes, segments = removals.get(writer, (0, []))
        removals[writer] = (num_bytes + segment.num_bytes, [*segments, segment])
    for num_bytes, segments in removals.values():
        last = segments[-1]
        time = _time(folder.read(last, max(0, last.num_bytes - 64_000), last.num_bytes))
        logs.write(last.path, removed_line(time, num_bytes))
        for segment in segments[:-1]:
            logs.remove(segment.path)


def _time(data: bytes) -> str:
    """Timestamp of the last line."""
    last = data.rstrip(b"\n").rpartition(b"\n")[2]
    return last[:TIME_CHARACTERS].decode(errors="replace")
