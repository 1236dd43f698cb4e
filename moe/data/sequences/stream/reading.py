"""Records of a shard, from any number on."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from moe.data.faults import Faults
from moe.data.sequences.stream.records import RecordSource
from moe.data.sequences.stream.shards import Shard
from moe.spec import SpecError, StreamableSpec

WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between the tries to read a file: stores and networks fail for moments."""


class ShardRecords:
    """Iterator over the records of a shard from number `first` on. After an error of reading, the file is opened again
    and read up to the same place, a limited number of times. Raises SpecError, with the file and the place in it.

    `is_one_document`: whether the shard is a text file, which its reader counts as unusable if it cannot be read.
    """

    def __init__(
        self,
        shard: Shard,
        source: RecordSource[Any],
        data: StreamableSpec,
        first: int = 0,
        *,
        is_one_document: bool = False,
        waits_s: Sequence[float] = WAITS_S,
    ) -> None:
        self._shard, self._source, self._data = shard, source, data
        self._first = self._next = first
        self._is_one_document, self._waits_s = is_one_document, waits_s
        self._faults = Faults.from_spec(data)
        self._records_before = self._bad_before = 0
        self.num_records = self.num_bad = 0
        """Records that were read after the one before `first`, unusable ones included, and how many of them were."""

    def __iter__(self) -> Iterator[Any]:
        waits = iter(self._waits_s)
        while True:
            begin = self._next
            try:
                yield from self._read()
                self._shard.require_unchanged()
                return
            except SpecError as error:
                if error.problems[0].code != "unreadable":
                    raise
                failure = error
            except FileNotFoundError:
                raise self._shard.vanished() from None
            except Exception as error:  # stores raise exceptions of their own
                failure = self._shard.file.unreadable(error)
            if self._next > begin:
                waits = iter(self._waits_s)
            wait_s = next(waits, None)
            if wait_s is None:
                raise failure
            time.sleep(wait_s)

    def require_usable(self) -> None:
        """Raise SpecError for unusable records, unless they may be skipped."""
        self._faults.end_file()

    def _read(self) -> Iterator[Any]:
        self._shard.require_unchanged()
        faults = self._faults = Faults.from_spec(self._data)
        for number, record in enumerate(self._source.records(self._shard.file, faults)):
            if number < self._first:
                self._records_before, self._bad_before = faults.num_records, faults.num_bad
            elif number == self._next:
                self._next += 1
                self._count()
                yield record
        self._count()
        if self._is_one_document and faults.has_unreadable:
            faults.raise_all()  # reading failed, not parsing

    def _count(self) -> None:
        self.num_records = self._faults.num_records - self._records_before
        self.num_bad = self._faults.num_bad - self._bad_before
