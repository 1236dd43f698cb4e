"""Limit of a job's log (`logs.max_bytes`): half for running processes, in equal shares, half for past ones. Each
writer keeps its newest segments, with a line that says how much was removed."""

from collections import deque

from moe.storage.folder import Folder
from service.wire.segments import Segment, SegmentFolder, WriterFolder

TIME_CHARACTERS = len("2026-01-31T12:00:00.123456Z")


def share_of_writer(max_bytes: int, num_workers: int) -> int:
    """Log bytes that the driver, and each of its workers, may keep."""
    return max(1, max_bytes // 2 // (num_workers + 1))


def removed_line(time: str, num_bytes: int) -> bytes:
    """Log line in place of removed earlier lines."""
    return f"{time} warning {num_bytes:,} earlier bytes of this log were removed: logs.max_bytes\n".encode()


class NewestSegments:
    """Limits a writer's sealed segments by removing the oldest."""

    def __init__(self, folder: Folder, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._segments: deque[tuple[str, int, str]] = deque()
        """(name, bytes, time of the last line) of each segment."""
        self._notice = ""
        """Name of the segment that holds the removal line."""
        self._removed_bytes = 0

    def newest_of(self, data: bytes) -> bytes:
        """The end of a segment's lines that fits the limit."""
        if len(data) <= self._max_bytes:
            return data
        begin = data.find(b"\n", len(data) - self._max_bytes) + 1
        self._removed_bytes += begin
        return removed_line(_time(data[:begin]), self._removed_bytes) + data[begin:]

    def add_segment(self, name: str, data: bytes) -> None:
        """Record a sealed segment, and remove the oldest. Raises OSError."""
        self._segments.append((name, len(data), _time(data)))
        while len(self._segments) > 1 and sum(num_bytes for _, num_bytes, _ in self._segments) > self._max_bytes:
            oldest, num_bytes, time = self._segments[0]
            self._folder.write(oldest, removed_line(time, self._removed_bytes + num_bytes))
            if self._notice:
                self._folder.remove(self._notice)
            self._segments.popleft()
            self._removed_bytes, self._notice = self._removed_bytes + num_bytes, oldest


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
