"""Log lines of a job's driver and workers, from the segments on its storage: also after they are gone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from service.report.segments import Segment, SegmentFolder, WriterFolder

BLOCK_BYTES = 64_000
MAX_LINE_BYTES = 64_000
"""A longer line comes in pieces."""
ROUND_BYTES = 256_000
"""What is read of one writer before the next has its turn."""


@dataclass(frozen=True)
class LogLine:
    writer: WriterFolder
    text: str


@dataclass
class _Position:
    """How far one writer has been read."""

    segment: int = 0
    offset: int = 0
    rest: bytes = b""


@dataclass
class LogReader:
    """Reads what there is, and later what came since. Holds a place and at most one line for each writer."""

    folder: SegmentFolder
    attempt: int | None = None
    worker: str | None = None
    """The name of one writer, such as `a1.g0.rank-3`, or its part after the attempt, such as `driver`."""
    _positions: dict[WriterFolder, _Position] = field(default_factory=dict)

    def writers(self) -> list[WriterFolder]:
        return [
            writer
            for writer in self.folder.writers()
            if self.attempt in (None, writer.attempt)
            and (self.worker is None or self.worker in (writer.name, writer.name.partition(".")[2]))
        ]

    def lines(self) -> Iterator[list[LogLine]]:
        """What is there now and was not read before, in small portions; a writer at a time, in turns.

        Raises OSError when storage cannot be read.
        """
        going = self.writers()
        while going:
            for writer in list(going):
                portion, more = self._portion(writer)
                if portion:
                    yield portion
                if not more:
                    going.remove(writer)

    def last_words(self) -> list[LogLine]:
        """Lines that were never ended, once nothing more will come."""
        return [
            LogLine(writer, position.rest.decode(errors="replace"))
            for writer, position in self._positions.items()
            if position.rest
        ]

    def _portion(self, writer: WriterFolder) -> tuple[list[LogLine], bool]:
        position = self._positions.setdefault(writer, _Position())
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
                lines += [LogLine(writer, line.decode(errors="replace")) for line in _cut(position, block)]
        return lines, False

    def _block(self, segment: Segment, position: _Position) -> bytes:
        block = self.folder.read(segment, position.offset, position.offset + BLOCK_BYTES)
        # A segment is whole when it appears; one that gives less than it says is taken to end here.
        position.offset = position.offset + len(block) if block else segment.num_bytes
        return block


def _cut(position: _Position, block: bytes) -> list[bytes]:
    *whole, rest = (position.rest + block).split(b"\n")
    if len(rest) > MAX_LINE_BYTES:
        whole.append(rest)
        rest = b""
    position.rest = rest
    return whole
