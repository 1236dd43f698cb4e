"""Blocks of an attention mask: which parts of it hide every pair of a query and a key, or none.

A block is a range of consecutive query positions and a range of consecutive key positions. A large block that hides
some of its pairs is cut into blocks of fewer queries, with only the keys that these may see.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moe.layers.attention_mask import AttentionMask
from moe.layers.chunked_attention import chunks_as_documents

TILE = 256
"""Positions of a block that needs a mask; queries per block then."""


class BlockKind(IntEnum):
    """Pairs of a query and a key of a block that a mask hides."""

    EMPTY = 0
    """All pairs."""
    MASKED = 1
    """Some pairs."""
    CAUSAL = 2
    """Keys after the query, of queries and keys with the same positions."""
    FULL = 3
    """No pairs."""


@dataclass(frozen=True)
class Segment:
    """Consecutive positions of a row, and where they are in a rank's tensors."""

    positions: range
    first_index: int

    def indices(self, positions: range) -> slice:
        """Indices of some of the positions."""
        start = positions.start - self.positions.start + self.first_index
        return slice(start, start + len(positions))


def segments_of(ranges: Iterable[range]) -> list[Segment]:
    """Segments of a tensor that has these positions one after the other; without the empty ones."""
    segments, index = [], 0
    for positions in ranges:
        if positions:
            segments.append(Segment(positions, index))
        index += len(positions)
    return segments


@dataclass(frozen=True)
class Block:
    """Queries and keys of a block, as slices of a rank's tensors."""

    queries: slice
    keys: slice
    kind: BlockKind
    query_positions: range
    key_positions: range
    """Positions of queries and keys; of no meaning in full blocks, which may have several ranges of either."""

    def shift_keys(self, shift: int) -> "Block":
        """The same block of a tensor whose keys begin `shift` positions later."""
        return replace(self, keys=slice(self.keys.start + shift, self.keys.stop + shift))


class MaskBlocks:
    """Blocks of an attention mask over rows of L positions."""

    def __init__(self, attention_mask: AttentionMask, num_positions: int, device: torch.device) -> None:
        """Raises ValueError for a mask whose keys differ by query."""
        if attention_mask.keys is not None and attention_mask.keys.dim() != 2:
            raise ValueError("keys by query cannot be attended to in blocks; gather the keys")
        if attention_mask.chunk is not None:
            attention_mask = _without_chunks(attention_mask, num_positions, device)
        self.attention_mask = attention_mask
        """The same mask without chunks of a sequence."""
        self._documents, self._first, self._keys = (
            None if tensor is None else tensor.cpu().numpy()
            for tensor in (attention_mask.documents, attention_mask.first, attention_mask.keys)
        )

    @classmethod
    def of(cls, attention_mask: AttentionMask, num_positions: int, device: torch.device) -> "MaskBlocks":
        """Blocks of the mask, computed once per pass and kind of layer. A mask with documents or padding is read from
        the device, which waits for it."""
        key = cls.key(attention_mask, num_positions)
        mask: MaskBlocks = attention_mask.get_or_make(key, lambda: cls(attention_mask, num_positions, device))
        return mask

    @staticmethod
    def key(attention_mask: AttentionMask, *others: Hashable) -> Hashable:
        """Key of what depends on the mask in its cache, which layers with another window or chunk share."""
        return "blocks", attention_mask.window, attention_mask.chunk, attention_mask.first_key, *others

    def bias(self, block: Block, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`[B or 1, 1, N or 1, K]`: 0 where a query of the block sees a key, else -inf."""
        visible = self.is_visible(_positions(block.query_positions, device)[:, None],
                                  _positions(block.key_positions, device)[None])  # fmt: skip
        return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))

    def is_visible(self, query: Tensor, key: Tensor) -> Tensor:
        """bool `[B or 1, 1, N or 1, K]` for positions `query` `[N, 1]` and `key` `[1, K]`."""
        if (keys := self.attention_mask.keys) is not None:
            return keys[:, key][:, None]
        return self.attention_mask.is_visible(query, key)

    def sees(self, queries: Sequence[range], keys: Sequence[range]) -> np.ndarray:
        """bool `[Q, K]`: whether any query of each range sees any key of each range. True also where documents that are
        not in order only seem to overlap."""
        return self._kinds(queries, keys) != BlockKind.EMPTY

    def blocks(self, queries: Sequence[Segment], keys: Sequence[Segment], *, in_tiles: bool = True) -> list[Block]:
        """Blocks that are not empty, of the queries and keys of some segments. With `in_tiles`, blocks that need a mask
        are cut into those of `TILE` queries."""
        kinds = self._kinds([segment.positions for segment in queries], [segment.positions for segment in keys])
        blocks = list[Block]()
        full_spans = list[tuple[slice, list[slice]]]()
        for query_segment, row in zip(queries, kinds, strict=True):
            full = []
            for key_segment, value in zip(keys, row, strict=True):
                pair = query_segment, key_segment
                match BlockKind(value):
                    case BlockKind.FULL:
                        full.append(key_segment.indices(key_segment.positions))
                    case BlockKind.MASKED if in_tiles:
                        blocks += self._tiles(*pair)
                    case BlockKind.MASKED | BlockKind.CAUSAL as kind:
                        blocks.append(_block(*pair, query_segment.positions, key_segment.positions, kind))
            full_spans.append((query_segment.indices(query_segment.positions), _joined(full)))
        return blocks + list(_full_blocks(full_spans))

    def _tiles(self, query_segment: Segment, key_segment: Segment) -> Iterator[Block]:
        query_tiles, key_tiles = _tiles_of(query_segment.positions), _tiles_of(key_segment.positions)
        for queries, row in zip(query_tiles, self._kinds(query_tiles, key_tiles), strict=True):
            visible = np.flatnonzero(row != BlockKind.EMPTY)
            if len(visible) == 0:
                continue
            first, last = int(visible[0]), int(visible[-1])
            kinds = set(row[first : last + 1])
            is_uniform = kinds == {BlockKind.FULL} or kinds == {BlockKind.CAUSAL}
            kind = BlockKind(kinds.pop()) if is_uniform else BlockKind.MASKED
            keys = range(key_tiles[first].start, key_tiles[last].stop)
            yield _block(query_segment, key_segment, queries, keys, kind)

    def _kinds(self, queries: Sequence[range], keys: Sequence[range]) -> np.ndarray:
        """int `[Q, K]`: the kind of each pair of ranges, none of them empty."""
        if not (queries and keys):
            return np.empty((len(queries), len(keys)), dtype=np.int64)
        q_first, q_last = _bounds(queries)
        k_first, k_last = _bounds(keys)
        q_first, q_last = q_first[:, None], q_last[:, None]
        mask = self.attention_mask
        empty = np.zeros((len(queries), len(keys)), dtype=bool)
        full = ~empty
        causal = (q_first == k_first) & (q_last == k_last) & mask.causal
        if mask.causal:
            empty |= k_first > q_last
            full &= k_last <= q_first
        if mask.window is not None:
            empty |= k_last <= q_first - mask.window
            full &= k_first > q_last - mask.window
            causal &= q_last - q_first < mask.window
        for may_see, sees_all in self._row_conditions(queries, keys):
            empty |= ~may_see
            full &= sees_all
            causal &= sees_all
        if self._keys is None:  # each position sees itself
            empty &= (k_first > q_last) | (k_last < q_first)
        return np.select([empty, full, causal], [BlockKind.EMPTY, BlockKind.FULL, BlockKind.CAUSAL], BlockKind.MASKED)

    def _row_conditions(self, queries: Sequence[range], keys: Sequence[range]) -> Iterator[tuple[np.ndarray, ...]]:
        """(whether some query of some row may see a key, whether all queries of all rows see all keys) `[Q, K]`, by
        documents, left padding and keys."""
        if self._documents is not None:
            q_low, q_high, q_real = _document_bounds(self._documents, queries)
            k_low, k_high, k_real = _document_bounds(self._documents, keys)
            q_low, q_high, q_real = (bound[:, :, None] for bound in (q_low, q_high, q_real))
            k_low, k_high, k_real = (bound[:, None] for bound in (k_low, k_high, k_real))
            overlap = (q_low <= k_high) & (k_low <= q_high)
            one = (q_low == k_high) & (k_low == q_high) & q_real & k_real
            yield np.any(overlap, axis=0), np.all(one, axis=0)
        if self._first is not None:
            first = self._first[:, None]
            q_first, q_last = (bound[None] for bound in _bounds(queries))
            k_first, k_last = (bound[None] for bound in _bounds(keys))
            may_see = (q_last >= first)[:, :, None] & (k_last >= first)[:, None]
            sees_all = (q_first >= first)[:, :, None] & (k_first >= first)[:, None]
            yield np.any(may_see, axis=0), np.all(sees_all, axis=0)
        if self._keys is not None:
            visible = [self._keys[:, positions.start : positions.stop] for positions in keys]
            shape = len(queries), len(keys)
            yield (np.broadcast_to(np.array([bool(part.any()) for part in visible], dtype=bool), shape),
                   np.broadcast_to(np.array([bool(part.all()) for part in visible], dtype=bool), shape))  # fmt: skip


def _without_chunks(mask: AttentionMask, num_positions: int, device: torch.device) -> AttentionMask:
    """The same mask, with chunks as documents."""
    assert mask.chunk is not None
    if mask.is_by_row:
        return chunks_as_documents(mask, num_positions, device)
    positions = torch.arange(mask.first_key, mask.first_key + num_positions, device=device)
    return AttentionMask(documents=positions.div(mask.chunk, rounding_mode="floor")[None])


def _bounds(ranges: Sequence[range]) -> tuple[np.ndarray, np.ndarray]:
    """int64 (first, last position) of each range."""
    return (np.array([positions.start for positions in ranges], dtype=np.int64),
            np.array([positions.stop - 1 for positions in ranges], dtype=np.int64))  # fmt: skip


def _document_bounds(documents: np.ndarray, ranges: Sequence[range]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(least, greatest document number `[B, R]`, whether there is no padding) of each range. Ranges of padding alone
    have a least number above the greatest."""
    parts = [documents[:, positions.start : positions.stop] for positions in ranges]
    none = np.iinfo(documents.dtype).max
    low = [np.where(part < 0, none, part).min(axis=1) for part in parts]
    high = [part.max(axis=1) for part in parts]
    real = [(part >= 0).all(axis=1) for part in parts]
    return np.stack(low, axis=1), np.stack(high, axis=1), np.stack(real, axis=1)


def _tiles_of(positions: range) -> list[range]:
    return [positions[start : start + TILE] for start in range(0, len(positions), TILE)]


def _positions(positions: range, device: torch.device) -> Tensor:
    return torch.arange(positions.start, positions.stop, device=device)


def _block(query_segment: Segment, key_segment: Segment, queries: range, keys: range, kind: BlockKind) -> Block:
    return Block(query_segment.indices(queries), key_segment.indices(keys), kind, queries, keys)


def _joined(spans: Sequence[slice]) -> list[slice]:
    """The same indices with adjacent slices joined."""
    joined = list[slice]()
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = slice(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return joined


def _full_blocks(full_spans: Sequence[tuple[slice, list[slice]]]) -> Iterator[Block]:
    """Full blocks of the keys that each slice of queries sees; adjacent queries with the same keys share blocks."""
    queries: slice | None = None
    for (span, keys), following in pairwise((*full_spans, (slice(0, 0), []))):
        queries = slice(span.start if queries is None else queries.start, span.stop)
        if following == (slice(queries.stop, following[0].stop), keys):
            continue
        for key_span in keys:
            yield Block(queries, key_span, BlockKind.FULL, range(0), range(0))
        queries = None
