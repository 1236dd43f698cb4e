"""A writer's undelivered records, read from the node's disk: at most one batch in memory."""

import json
from collections.abc import Sequence
from pathlib import Path

from service.run.spool import LocalSegment, Spool, local_segments
from service.wire.events import MAX_BATCH_BYTES, MAX_BATCH_RECORDS

BATCH_BYTES = MAX_BATCH_BYTES // 4


class Outbox:
    """Spooled records of a writer whose delivery is not confirmed."""

    def __init__(self, spool: Spool | Path, writer: str) -> None:
        """`spool`: this process's spool, or the folder of a dead writer's."""
        self.writer = writer
        self._spool = spool
        self.next_seq = 0
        """Sequence number below which every record is delivered."""
        self._position = (0, 0)
        """(segment, byte) of the next record; one tuple, for thread safety."""
        self.is_refused = False
        """The control plane accepts no more; storage has the rest."""

    def batch(self) -> list[bytes]:
        """Next records as JSON lines with sequence numbers; empty if none. If earlier records are missing here, the
        writer counts as refused, as in `seek`."""
        number, byte = self._position
        for segment in self._segments():
            offset = byte if segment.number == number else 0
            if segment.number >= number and (data := segment.whole_lines(offset, BATCH_BYTES)):
                self._position = (segment.number, offset)
                lines = data.splitlines()[:MAX_BATCH_RECORDS]
                if json.loads(lines[0])["seq"] > self.next_seq:
                    self.is_refused = True
                    return []
                return lines
        return []

    def acknowledge(self, lines: list[bytes], next_seq: int) -> None:
        """Process a response: the control plane has all records below `next_seq`."""
        if next_seq == self.next_seq + len(lines):
            number, byte = self._position
            self._position = (number, byte + sum(len(line) + 1 for line in lines))
            self.next_seq = next_seq
        elif next_seq != self.next_seq:
            self.seek(next_seq)

    def seek(self, next_seq: int) -> None:
        """Continue from record `next_seq`, forwards or backwards. If it was delivered once and removed here, the
        writer counts as refused: the control plane reads storage."""
        self.next_seq = next_seq
        for segment in self._segments():
            lines = segment.whole_lines().splitlines()
            if not lines:
                continue
            first: int = json.loads(lines[0])["seq"]
            if first > next_seq:
                self.is_refused = True
                return
            if next_seq < first + len(lines):
                earlier_lines = lines[: next_seq - first]
                self._position = (segment.number, sum(len(line) + 1 for line in earlier_lines))
                return
            # All delivered; the next record is in a later segment.
            self._position = (segment.number, sum(len(line) + 1 for line in lines))

    def _segments(self) -> Sequence[LocalSegment]:
        return self._spool.segments() if isinstance(self._spool, Spool) else local_segments(self._spool)

    def has_left(self, segment: LocalSegment) -> bool:
        """Whether a complete segment was delivered, or will never be requested."""
        number, byte = self._position
        if self.is_refused or segment.number < number:
            return True
        return segment.number == number and not segment.whole_lines(byte)
