"""Log lines of a job's driver and workers, from segments on its storage, without terminal control sequences."""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter

from service.control.store.clock import to_us
from service.wire.segments import Segment, SegmentFolder, WriterFolder

BLOCK_BYTES = 64_000
MAX_LINE_BYTES = 64_000
"""Longer lines are split."""
ROUND_BYTES = 256_000
"""Maximum number of bytes read from one writer before the next writer's turn."""
TAIL_CHARACTERS = 8_000_000
"""Maximum number of characters in all newest lines together."""
TAIL_BYTES = 2 * BLOCK_BYTES
"""Bytes from a writer's end in which its newest lines are first looked for, four times as many each next time."""
MAX_TIMELESS_BYTES = 4_000_000
"""Maximum number of bytes from a writer's end that are read for the time of lines that have none."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z(?= )")
_LEVEL = re.compile(_TIME.pattern + r" ([a-z]+) ")
LEVELS = {"debug": 10, "info": 20, "out": 20, "err": 20, "warning": 30, "error": 40, "critical": 50}
"""Severity by the level of a line; `out` and `err`: printed text."""
_HEAD_BYTES = 64
_TIMES = re.compile(rb"^" + _TIME.pattern.encode(), re.MULTILINE)
_UNPRINTED = bytes([*range(9), *range(11, 32), 127])
"""Control characters except tab and newline; text without them is searched before it is cut into lines."""


@dataclass(frozen=True)
class LogLine:
    writer: WriterFolder
    text: str
    time: int
    """Timestamp of the line or the writer's last timestamp; 0 before the first."""
    position: tuple[int, int]
    """End of the line in its writer's log; increasing."""


@dataclass(frozen=True)
class LogChoice:
    """Filter of log lines."""

    attempt: int | None = None
    worker: str | None = None
    """Name of a writer, such as `a1.g0.rank-3`, with or without the attempt."""
    since: int = 0
    grep: str = ""
    """Literal text that a line must contain."""
    raw: bool = False
    """Keep terminal escape sequences."""
    severity: int = 0
    """Minimum severity of a line. A line without a level counts as `info`."""

    @property
    def level_names(self) -> list[str]:
        """Levels that match; empty if lines without a level match too."""
        if self.severity <= LEVELS["info"]:
            return []
        return [name for name, level_severity in LEVELS.items() if level_severity >= self.severity]

    def matches_writer(self, writer: WriterFolder) -> bool:
        names = (writer.name, writer.name.partition(".")[2])
        return self.attempt in (None, writer.attempt) and (self.worker is None or self.worker in names)

    def may_match(self, data: bytes) -> bool:
        """False if no line of `data` contains the searched text, or none has a level that is severe enough; True also
        where cleaning might change a line."""
        if not (self.grep or self.level_names) or not data.isascii():
            return True
        if not (self.raw or data.translate(None, _UNPRINTED) == data):
            return True
        levels = self.level_names
        return self.grep.encode() in data and (not levels or any(b"Z %b " % name.encode() in data for name in levels))

    def matches(self, line: LogLine) -> bool:
        is_severe = not self.severity or severity(line.text) >= self.severity
        return is_severe and line.time >= self.since and self.grep in line.text


@dataclass
class _Position:
    """Position up to which a writer has been read."""

    segment: int = 0
    offset: int = 0
    partial_line: bytes = b""
    time: int = 0
    is_in_line: bool = False
    """Whether reading began within a line, of which the rest is skipped."""


@dataclass
class LogReader:
    """Reads existing lines, later new ones. Holds at most one line per writer."""

    folder: SegmentFolder
    choice: LogChoice = LogChoice()
    _positions: dict[WriterFolder, _Position] = field(default_factory=dict)

    def writers(self) -> list[WriterFolder]:
        return [writer for writer in self.folder.writers() if self.choice.matches_writer(writer)]

    def lines(self) -> Iterator[list[LogLine]]:
        """Unread lines in small, possibly empty portions; writers take turns. Raises OSError."""
        unread_writers = self.writers()
        while unread_writers:
            for writer in list(unread_writers):
                portion, has_more = self._portion(writer)
                yield portion
                if not has_more:
                    unread_writers.remove(writer)

    def newest(self, limit: int) -> Iterator[list[LogLine]]:
        """Newest lines of all writers by time, as the last portion, after empty ones. Reads from each writer's end,
        without filters little more than the result. `lines` continues after them. Before a clock was set back, times
        count only as far as the log is read."""
        newest_lines: deque[LogLine] = deque()
        for writer in self.writers():
            writer_lines = yield from self._newest_of(writer, limit)
            newest_lines = deque(sorted((*newest_lines, *writer_lines), key=attrgetter("time")))
            _trim(newest_lines, limit)
        yield list(newest_lines)

    def _newest_of(self, writer: WriterFolder, limit: int) -> Generator[list[LogLine], None, deque[LogLine]]:
        segments = self.folder.segments(writer)
        segments = segments[self._begin(segments) :]
        num_bytes = TAIL_BYTES
        while True:
            self._positions[writer] = position = _tail(segments, num_bytes)
            is_from_beginning = not position.is_in_line
            lines: deque[LogLine] = deque()
            is_full, has_more = limit == 0, True
            while has_more:
                portion, has_more = self._portion(writer)
                lines.extend(portion)
                is_full |= _trim(lines, limit) or len(lines) == limit
                yield []
            is_timed = (lines[0].time if lines else position.time) > 0 or num_bytes >= MAX_TIMELESS_BYTES
            if is_from_beginning or (is_full and is_timed and not position.is_in_line):
                return lines
            num_bytes *= 4

    def unterminated_lines(self) -> list[LogLine]:
        """Last lines without a line end, once nothing more will be written."""
        return [
            line
            for writer, position in self._positions.items()
            if position.partial_line
            and self.choice.matches(
                line := _line(writer, position, position.partial_line, position.offset, self.choice.raw)
            )
        ]

    def _portion(self, writer: WriterFolder) -> tuple[list[LogLine], bool]:
        if (position := self._positions.get(writer)) is None:
            segments = self.folder.segments(writer) if self.choice.since else []
            first = segments[self._begin(segments)].number if segments else 0
            position = self._positions[writer] = _Position(first)
        lines: list[LogLine] = []
        num_bytes = 0
        for segment in self.folder.segments(writer, position.segment):
            if segment.number > position.segment:
                position.segment, position.offset = segment.number, 0
            while position.offset < segment.num_bytes:
                if num_bytes >= ROUND_BYTES:
                    return lines, True
                block = self._block(segment, position)
                num_bytes += len(block)
                if position.is_in_line:
                    _, newline, block = block.partition(b"\n")
                    position.is_in_line = not newline
                end = position.offset - len(position.partial_line) - len(block)
                raw_lines = _cut(position, block)
                if not self.choice.may_match(text := b"\n".join(raw_lines)):
                    position.time = max(position.time, _latest_time(text))
                    continue
                for raw in raw_lines:
                    end += len(raw) + 1
                    line = _line(writer, position, raw, end, self.choice.raw)
                    if self.choice.matches(line):
                        lines.append(line)
        return lines, False

    def _begin(self, segments: list[Segment]) -> int:
        """Index of the last segment that surely begins before `since`, by bisection."""
        if not self.choice.since:
            return 0

        def first_time(segment: Segment) -> int:
            head = self.folder.read(segment, 0, _HEAD_BYTES).decode(errors="replace")
            return line_time(head) or 1 << 62

        return max(0, bisect_right(segments, self.choice.since - 1, key=first_time) - 1)

    def _block(self, segment: Segment, position: _Position) -> bytes:
        block = self.folder.read(segment, position.offset, position.offset + BLOCK_BYTES)
        # Segments appear complete; one that is shorter than its reported size ends here.
        position.offset = position.offset + len(block) if block else segment.num_bytes
        return block


def _tail(segments: list[Segment], num_bytes: int) -> _Position:
    """Position at most a block more than `num_bytes` before the end, between two blocks of a segment as `lines` reads
    them, so that it cuts long lines at the same places; or at the beginning."""
    for segment in reversed(segments):
        if num_bytes <= segment.num_bytes:
            offset = (segment.num_bytes - num_bytes) // BLOCK_BYTES * BLOCK_BYTES
            is_beginning = segment is segments[0] and not offset
            return _Position(segment.number, offset, is_in_line=not is_beginning)
        num_bytes -= segment.num_bytes
    return _Position(segments[0].number if segments else 0)


def _cut(position: _Position, block: bytes) -> list[bytes]:
    *lines, partial_line = (position.partial_line + block).split(b"\n")
    if len(partial_line) > MAX_LINE_BYTES:
        lines.append(partial_line)
        partial_line = b""
    position.partial_line = partial_line
    return lines


def _line(writer: WriterFolder, position: _Position, raw: bytes, end: int, as_written: bool) -> LogLine:
    text = raw.decode(errors="replace")
    if not as_written:
        text = plain_text(text)
    # Clock changes and lines without a time must not reorder a writer's lines.
    position.time = max(position.time, line_time(text))
    return LogLine(writer, text, position.time, (position.segment, end))


def level_of(text: str) -> str | None:
    """Level of a line: a key of `LEVELS`, or None."""
    match = _LEVEL.match(text)
    return match[1] if match is not None and match[1] in LEVELS else None


def severity(text: str) -> int:
    return LEVELS[level_of(text) or "info"]


def line_time(text: str) -> int:
    """Timestamp at the start of a line; 0 if there is none."""
    if (match := _TIME.match(text)) is None:
        return 0
    try:
        return to_us(datetime.fromisoformat(match[0]))
    except ValueError:
        return 0


def _latest_time(data: bytes) -> int:
    """Latest timestamp of the lines of ASCII text; 0 if there is none."""
    times = sorted(set(_TIMES.findall(data)), reverse=True)
    return next((time for text in times if (time := line_time(f"{text.decode()} "))), 0)


def _trim(lines: deque[LogLine], limit: int) -> bool:
    """Remove the oldest lines beyond the limits; returns whether there were any."""
    num_lines = len(lines)
    characters = sum(len(line.text) for line in lines)
    while lines and (len(lines) > limit or characters > TAIL_CHARACTERS):
        characters -= len(lines.popleft().text)
    return len(lines) < num_lines


_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, movements of the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC and its like: titles, links, clipboards
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
"""ECMA-48 escape sequences; of a truncated one, its beginning."""
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tabs, and characters that change text direction."""


def plain_text(line: str) -> str:
    """A line without control sequences; inner carriage returns become spaces."""
    if line.isprintable():
        return line
    return _CONTROLS.sub("", _SEQUENCES.sub("", line).rstrip("\r").replace("\r", " "))
