"""Order of a stream: pure functions of the seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.data.draws import permutation, seeded_generator

_DRAWS_OF_PASSES, _DRAWS_OF_WINDOWS = 0x57A9, 0x57A1
"""Streams of the draws of this file."""


class Piece(NamedTuple):
    """Documents of a shard with numbers n such that n % `num_strides` = `stride`."""

    shard: int
    """Index of the shard in its source."""
    stride: int
    num_strides: int


class PieceOrder:
    """Endless order of a source's pieces: pass after pass, each in a different order, dealt out to the partitions in
    turn. A shard is one piece, or several if there are fewer shards than partitions."""

    def __init__(self, seed: int, source: int, num_shards: int, num_partitions: int) -> None:
        self._seed, self._source, self._num_partitions = seed, source, num_partitions
        self._num_strides = -(-num_partitions // num_shards)
        self.num_pieces = num_shards * self._num_strides
        self._passes: dict[int, NDArray[np.int64]] = {}

    def piece(self, partition: int, number: int) -> Piece:
        """Piece `number` (from 0) of a partition."""
        pass_number, index = divmod(number * self._num_partitions + partition, self.num_pieces)
        shard, stride = divmod(int(self._pass(pass_number)[index]), self._num_strides)
        return Piece(shard, stride, self._num_strides)

    def _pass(self, number: int) -> NDArray[np.int64]:
        """Order of one pass; the last one used is kept."""
        if number not in self._passes:
            generator = seeded_generator(self._seed, number, stream=_DRAWS_OF_PASSES, substream=self._source)
            self._passes = {number: permutation(generator, self.num_pieces)}
        return self._passes[number]


class SourcePosition(NamedTuple):
    """Position of one source in a partition."""

    piece: int = 0
    """Number of the current piece."""
    document: int = 0
    """Documents that were read of its shard, those of other pieces and unused ones included."""
    num_bytes: int = 0
    """Bytes of text for training that were read before, in all pieces."""
    num_records: int = 0
    """Records that were read before, and how many of them were unusable."""
    num_bad: int = 0


class WindowPosition(NamedTuple):
    """Beginning of a partition's window."""

    number: int
    """Number of the window: how far each source should have been read."""
    first_row: int
    """Number of its first row in the partition."""
    sources: tuple[SourcePosition, ...]

    @classmethod
    def start(cls, num_sources: int) -> "WindowPosition":
        """Beginning of a partition."""
        return cls(0, 0, (SourcePosition(),) * num_sources)

    @classmethod
    def of_plain(cls, plain: Sequence[object]) -> "WindowPosition":
        """Position from the lists that JSON makes of it. Raises TypeError or ValueError for others."""
        number, first_row, sources = plain
        if not isinstance(number, int) or not isinstance(first_row, int) or not isinstance(sources, list | tuple):
            raise TypeError(f"{plain!r} is not the position of a window")
        return cls(number, first_row, tuple(SourcePosition(*source) for source in sources))


def row_order(seed: int, partition: int, window: int, num_rows: int) -> NDArray[np.int64]:
    """Order in which the rows of a window are used."""
    generator = seeded_generator(seed, window, stream=_DRAWS_OF_WINDOWS, substream=partition)
    return permutation(generator, num_rows)
