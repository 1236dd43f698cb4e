"""Zigzag chunks: the positions of a sequence that each context rank has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ZigzagChunks:
    """Rows of L positions, cut into 2c chunks of ceil(L / 2c) positions for c context ranks; the last chunks may be
    shorter, or empty. Rank i has the chunks i and 2c - 1 - i, so that under a causal mask every rank has as many pairs
    of a query and a visible key."""

    num_positions: int
    """L"""
    num_ranks: int
    """c"""

    @property
    def chunk_size(self) -> int:
        """Positions of a whole chunk."""
        return -(-self.num_positions // (2 * self.num_ranks))

    def chunk(self, index: int) -> range:
        """Positions of a chunk."""
        start, stop = (min(number * self.chunk_size, self.num_positions) for number in (index, index + 1))
        return range(start, stop)

    def rank_chunks(self, rank: int) -> tuple[range, range]:
        """Positions of a rank's two chunks, the earlier one first."""
        return self.chunk(rank), self.chunk(2 * self.num_ranks - 1 - rank)

    def num_rank_positions(self, rank: int) -> int:
        """Number of a rank's positions, N."""
        return sum(map(len, self.rank_chunks(rank)))
