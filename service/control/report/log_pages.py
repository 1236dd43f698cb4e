"""Pages of a job's log from its end backwards; a page reads a bounded part of the segments."""

import base64
import binascii
import heapq
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from time import monotonic
from typing import NamedTuple

from service.control.report.logs import MAX_LINE_BYTES, LogChoice, LogLine, line_time, plain_text
from service.wire.segments import Segment, SegmentFolder, WriterFolder

PAGE_BYTES = 32_000_000
"""Maximum number of bytes that a page reads; it may then have fewer lines than requested, or none, and a cursor."""
PAGE_S = 2.0
"""Longest time that a page reads and searches, about, with the same consequence: storage may be slow, and lines that
have to be parsed take fifty times as long as text that is skipped."""
_BLOCK_BYTES = (8_000, 32_000, 128_000, 512_000)
"""Sizes of a writer's first blocks, the last one also of further ones: with many writers, most end after the first."""
_MAX_TIMELESS = 1000
"""Maximum number of lines without a time that wait for the time of an earlier line."""
_HEAD_BYTES = 64
_LATEST = 1 << 62
"""Time of lines before which no time is known."""


class LogKey(NamedTuple):
    """Position of a line in the merged log of all writers: newest last."""

    time: int
    attempt: int
    group: int
    rank: int
    segment: int
    end: int

    @property
    def writer(self) -> tuple[int, int, int]:
        return self.attempt, self.group, self.rank

    @property
    def position(self) -> tuple[int, int]:
        return self.segment, self.end


@dataclass(frozen=True)
class LogPage:
    """Lines, newest first. `next_before`: where the next page continues, None at the beginning of the log."""

    lines: list[LogLine]
    next_before: LogKey | None
    searched_to: int
    """Time down to which the log was searched; 0 if unknown."""


class _Entry(NamedTuple):
    """A line, or, without one, a mark that no line down to `key` matches."""

    key: LogKey
    line: LogLine | None


@dataclass
class _Reading:
    """Bytes read so far for one page."""

    num_bytes: int = 0


@dataclass(frozen=True)
class LogPager:
    """Reads one page. Lines of one writer are in order of position; those of several are merged by time, so that a
    clock set back by hand can move lines between pages."""

    folder: SegmentFolder
    choice: LogChoice
    _reading: _Reading = field(default_factory=_Reading)

    def page(self, limit: int, before: LogKey | None = None) -> LogPage:
        """At most `limit` lines before `before`, or the newest. Raises OSError."""
        writers = [writer for writer in self.folder.writers() if self.choice.matches_writer(writer)]
        entries = heapq.merge(*(self._entries(writer, before) for writer in writers), key=_key_of, reverse=True)
        lines: list[LogLine] = []
        last: LogKey | None = None
        until = monotonic() + PAGE_S
        for key, line in entries:
            last = key
            if key.time and key.time < self.choice.since:
                return LogPage(lines, None, key.time)
            if line is not None and self.choice.matches(line):
                lines.append(line)
            if len(lines) >= limit or self._reading.num_bytes >= PAGE_BYTES or monotonic() >= until:
                return LogPage(lines, key, key.time)
        return LogPage(lines, None, last.time if last is not None else 0)

    def _entries(self, writer: WriterFolder, before: LogKey | None) -> Iterator[_Entry]:
        """A writer's entries before `before`, newest first, with times that never increase."""
        newest = _LATEST if before is None else before.time
        timeless: list[tuple[tuple[int, int], str]] = []
        for position, time, text in self._texts(writer, before):
            if before is not None and self._is_after(writer, position, time, before):
                if time:
                    timeless.clear()  # they follow a line that earlier pages had
                continue
            if not time and text is not None and len(timeless) < _MAX_TIMELESS:
                timeless.append((position, text))
                continue
            newest = min(newest, time) if time else newest
            for timeless_position, timeless_text in timeless:
                yield _entry(writer, timeless_position, newest, timeless_text)
            timeless.clear()
            yield _entry(writer, position, newest, text)
        for timeless_position, timeless_text in timeless:  # the log begins with them
            yield _entry(writer, timeless_position, 0, timeless_text)

    def _is_after(self, writer: WriterFolder, position: tuple[int, int], time: int, before: LogKey) -> bool:
        """Whether earlier pages had this line."""
        own = (writer.attempt, writer.group, writer.rank)
        if own == before.writer:
            return position >= before.position
        return bool(time) and (time, own) > (before.time, before.writer)

    def _texts(self, writer: WriterFolder, before: LogKey | None) -> Iterator[tuple[tuple[int, int], int, str | None]]:
        """(position, time, text) of lines, newest first; without text for the newest and oldest line with a time of
        a block in which nothing matches."""
        segments = self.folder.segments(writer)
        start_offset: int | None = None
        if before is not None:
            if (writer.attempt, writer.group, writer.rank) == before.writer:
                segments = [segment for segment in segments if segment.number <= before.segment]
                if segments and segments[-1].number == before.segment:
                    start_offset = before.end
            else:
                segments = segments[: self._num_segments_until(segments, before.time)]
        partial_line, partial_end = b"", None
        num_blocks = 0
        for segment in reversed(segments):
            end = segment.num_bytes if start_offset is None else min(start_offset, segment.num_bytes)
            start_offset = None
            while end > 0:
                begin = max(0, end - _BLOCK_BYTES[min(num_blocks, len(_BLOCK_BYTES) - 1)])
                num_blocks += 1
                block = self.folder.read(segment, begin, end)
                self._reading.num_bytes += len(block)
                head, newline, tail = block.partition(b"\n")
                if not newline and len(block) + len(partial_line) <= MAX_LINE_BYTES:
                    partial_line, partial_end = block + partial_line, partial_end or (segment.number, end)
                elif not newline:
                    yield self._text(partial_end or (segment.number, end), block + partial_line)
                    partial_line, partial_end = b"", None
                else:
                    yield from self._block(segment, begin + len(head) + 1, tail + partial_line, partial_end)
                    partial_line, partial_end = head, (segment.number, begin + len(head) + 1)
                end = begin
        if partial_line or partial_end is not None:
            yield self._text(partial_end or (0, 0), partial_line)

    def _block(
        self, segment: Segment, begin: int, data: bytes, last_end: tuple[int, int] | None
    ) -> Iterator[tuple[tuple[int, int], int, str | None]]:
        """Lines of `data`, which begins with a line at `begin` of the segment. `last_end`: end of its last line, if
        that is in a later block."""
        if not self.choice.may_match(data) and (newest := _newest_timed(data)) is not None:
            # The newest has the time of lines without one in the next block; the oldest is as far as was searched.
            for offset, time in dict.fromkeys((newest, _oldest_timed(data))):
                is_last = offset == len(data) and not data.endswith(b"\n")
                yield (is_last and last_end) or (segment.number, begin + offset), time, None
            return
        *lines, unfinished = data.split(b"\n")
        offsets = accumulate((len(raw) + 1 for raw in lines), initial=begin)
        ends = [(segment.number, offset) for offset in islice(offsets, 1, None)]
        if last_end is not None or unfinished:
            lines.append(unfinished)
            ends.append(last_end or (segment.number, begin + len(data)))
        for end, raw in zip(reversed(ends), reversed(lines), strict=True):
            yield self._text(end, raw)

    def _text(self, end: tuple[int, int], raw: bytes) -> tuple[tuple[int, int], int, str | None]:
        text = raw.decode(errors="replace")
        text = text if self.choice.raw else plain_text(text)
        return end, line_time(text), text

    def _num_segments_until(self, segments: list[Segment], time: int) -> int:
        """Number of segments that begin no later than a time, by bisection."""

        def first_time(segment: Segment) -> int:
            return line_time(self.folder.read(segment, 0, _HEAD_BYTES).decode(errors="replace"))

        return bisect_right(segments, time, key=first_time)


def _newest_timed(data: bytes) -> tuple[int, int] | None:
    """(end, time) of the last line with a time."""
    end = len(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        if time := _time_at(data, start):
            return end, time
        end = start
    return None


def _oldest_timed(data: bytes) -> tuple[int, int]:
    """(end, time) of the first line with a time; there must be one."""
    start = 0
    while not (time := _time_at(data, start)):
        start = data.index(b"\n", start) + 1
    newline = data.find(b"\n", start)
    return (newline + 1 or len(data)), time


def _time_at(data: bytes, start: int) -> int:
    return line_time(data[start : start + _HEAD_BYTES].decode(errors="replace"))


def _entry(writer: WriterFolder, position: tuple[int, int], time: int, text: str | None) -> _Entry:
    key = LogKey(time, writer.attempt, writer.group, writer.rank, *position)
    return _Entry(key, None if text is None else LogLine(writer, text, time, position))


def _key_of(entry: _Entry) -> LogKey:
    return entry.key


def write_before(key: LogKey) -> str:
    """Encode a key as an opaque cursor."""
    return base64.urlsafe_b64encode(json.dumps(key, separators=(",", ":")).encode()).decode().rstrip("=")


def read_before(cursor: str) -> LogKey:
    """Key in a cursor. Raises ValueError for one that `write_before` did not write."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        numbers = json.loads(text)
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if not (isinstance(numbers, list) and len(numbers) == len(LogKey._fields)):
        raise ValueError("has other fields")
    if not all(type(number) is int and -1 <= number <= _LATEST for number in numbers):
        raise ValueError("has other values")
    return LogKey(*numbers)
