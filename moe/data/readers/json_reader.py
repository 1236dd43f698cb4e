"""Files of JSON Lines, or of one JSON array."""

from collections.abc import Iterator

from moe.data.data_file import DataFile
from moe.data.faults import Faults
from moe.data.json_lines import rows
from moe.data.lines import Lines
from moe.data.readers.reader import MAX_RECORD_BYTES, Record, RecordReader


class JsonReader(RecordReader):
    """Objects, one per line or in one array."""

    def __init__(self, remedy: str, max_bytes: int = MAX_RECORD_BYTES) -> None:
        """`remedy`: for records of more than `max_bytes`."""
        self._remedy, self._max_bytes = remedy, max_bytes

    def lines(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Lines:
        """Lines of a file, whose objects `records_of` reads."""
        return Lines(file, limit_bytes, max_line_bytes=self._max_bytes, remedy=self._remedy, faults=faults)

    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[Record]:
        return self.records_of(self.lines(file, faults, limit_bytes), faults)

    def records_of(self, lines: Lines, faults: Faults) -> Iterator[Record]:
        """Records on lines, or of one array over them."""
        return (Record(*row) for row in rows(lines, faults))
