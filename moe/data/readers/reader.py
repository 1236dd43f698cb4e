"""Contract of readers of files."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moe.data.data_file import DataFile
from moe.data.faults import Faults

MAX_RECORD_BYTES = 64 << 20
"""Largest document or other record in bytes of UTF-8: it is held in memory, several times while it is encoded."""


class Record(NamedTuple):
    """A record of a user's file."""

    position: str
    """`, line 3`, `, item 3` or `, row 3`, to be appended to the file's name; empty for a file that is one record."""
    values: Mapping[str, object]
    num_bytes: int
    """Approximate number of bytes of its text."""


class RecordReader(ABC):
    """Reads the records of files of one kind."""

    @abstractmethod
    def records(self, file: DataFile, faults: Faults, limit_bytes: int | None = None) -> Iterator[Record]:
        """Records of a file, in order; with `limit_bytes`, from about that many bytes, but at least one.

        Raises SpecError, with the file and the line or row, for unreadable content; one unreadable record of several is
        added to `faults`.
        """
