"""Recurrences along rows that are split over context ranks: what a chunk needs from the chunks before it.

Shapes: B rows, L positions, N of them on this rank, 2c zigzag chunks of s positions (`ZigzagChunks`). A rank's two
chunks are stacked as rows: `[2B, s, ...]`, the earlier chunk's rows first, with zeros after a row's end.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from moe.layers.chunks import document_starts
from moe.parallel import ContextShard
from moe.parallel.collective import PairedCollective, all_gather_single, collective, reduce_scatter_single
from moe.parallel.zigzag import ZigzagChunks


@dataclass(frozen=True)
class ChunkDocuments:
    """Documents of rows by chunk."""

    documents: Tensor
    """int `[B, L]`: document of each position, -1 for padding."""
    chunks: ZigzagChunks

    @cached_property
    def by_chunk(self) -> Tensor:
        """int `[2c, B, s]`: documents, -1 after a row's end."""
        return self._by_chunk(self.documents, -1)

    @cached_property
    def is_reset(self) -> Tensor:
        """bool `[2c, B]`: the first real position of a chunk is in another document than the last one before it."""
        is_real = self.by_chunk >= 0
        is_first = is_real & (is_real.cumsum(dim=-1) == 1)
        return (is_first & self._by_chunk(document_starts(self.documents), False)).any(dim=-1)

    def with_positions_before(self, number: int, num_before: int) -> Tensor:
        """int `[B, num_before + s]`: documents of a chunk and of the positions before it; -1 outside a row."""
        padded = functional.pad(self.documents, (num_before, self._num_missing), value=-1)
        return padded.narrow(1, number * self.chunks.chunk_size, num_before + self.chunks.chunk_size)

    @property
    def _num_missing(self) -> int:
        return 2 * self.chunks.num_ranks * self.chunks.chunk_size - self.chunks.num_positions

    def _by_chunk(self, x: Tensor, padding: int | bool) -> Tensor:
        """`[2c, B, s]` from `[B, L]`."""
        padded = functional.pad(x, (0, self._num_missing), value=padding)
        return padded.unflatten(1, (-1, self.chunks.chunk_size)).transpose(0, 1)


@dataclass(frozen=True)
class ContextChunks:
    """This rank's two chunks of each row."""

    shard: ContextShard
    documents: ChunkDocuments | None = None
    """None: each row is one document."""

    @property
    def num_chunks(self) -> int:
        """2c."""
        return 2 * self.shard.num_ranks

    @property
    def numbers(self) -> tuple[int, int]:
        """Numbers of this rank's chunks."""
        rank = self.shard.group.rank()
        return rank, self.num_chunks - 1 - rank

    @property
    def stacked_documents(self) -> Tensor | None:
        """int `[2B, s]`: documents of this rank's chunks, -1 after a row's end."""
        return None if self.documents is None else torch.cat([self.documents.by_chunk[i] for i in self.numbers])

    def stack(self, x: Tensor) -> Tensor:
        """`[2B, s, ...]` from this rank's positions `[B, N, ...]`."""
        size, padding = self.shard.chunks.chunk_size, (0, 0) * (x.dim() - 2)
        parts = x.split(self._lengths, dim=1)
        return torch.cat([functional.pad(part, (*padding, 0, size - part.shape[1])) for part in parts])

    def unstack(self, x: Tensor) -> Tensor:
        """This rank's positions `[B, N, ...]` from `[2B, s, ...]`."""
        return torch.cat([part[:, :length] for part, length in zip(x.chunk(2), self._lengths, strict=True)], dim=1)

    @property
    def _lengths(self) -> list[int]:
        """Positions of this rank's chunks."""
        return [len(chunk) for chunk in self.shard.chunks.rank_chunks(self.shard.group.rank())]

    def gather(self, x: Tensor) -> Tensor:
        """All-gather `x` `[2B, ...]` of each rank's chunks into `[2c, B, ...]`, in the order of positions. The backward
        pass sums the gradients of all ranks (reduce-scatter)."""
        gathered: Tensor = PairedCollective.apply(x, self.shard, _all_gather, _reduce_scatter)
        by_rank = gathered.unflatten(0, (-1, 2, x.shape[0] // 2))
        return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0)))

    def with_positions_before(self, x: Tensor, num_before: int) -> tuple[Tensor, Tensor | None]:
        """The chunks `x` `[2B, s, ...]`, each after the positions before it (zeros before a row): `[2B, num_before + s,
        ...]`, and their documents. All-gathers the last positions of each chunk."""
        size = self.shard.chunks.chunk_size
        documents = None
        if self.documents is not None:
            documents = torch.cat([self.documents.with_positions_before(i, num_before) for i in self.numbers])
        if num_before == 0:
            return x, documents
        tail = min(num_before, size)  # or whole chunks, if the positions before are in several
        tails = self.gather(x[:, size - tail :]).transpose(0, 1).flatten(1, 2)  # [B, 2c * tail, ...]
        tails = functional.pad(tails, (*(0, 0) * (x.dim() - 2), num_before, 0))
        before = torch.cat([tails.narrow(1, number * tail, num_before) for number in self.numbers])
        return torch.cat((before, x), dim=1), documents

    def states_before(self, transition: Tensor, added: Tensor) -> Tensor:
        """Return the state before each of this rank's chunks, `[2B, h, dk, dv]`, where a chunk turns state S into
        `transition` · S + `added`; zeros where a document begins.

        `added` is `[2B, h, dk, dv]`; `transition` are matrices `[2B, h, dk, dk]`, or factors `[2B, h, 1, 1]`. They are
        all-gathered, so the ranks compute their chunks at the same time: passed on from chunk to chunk, states would
        take the time of one rank with whole rows. Exchanging heads for positions instead would send every position's
        queries, keys and values: more bytes from some hundred positions per rank.
        """
        sizes = added.shape[2:].numel(), transition.shape[2:].numel()
        packed = self.gather(torch.cat((added.flatten(2), transition.flatten(2)), dim=-1))
        all_added, all_transitions = (
            part.unflatten(-1, own.shape[2:])
            for part, own in zip(packed.split(sizes, dim=-1), (added, transition), strict=True)
        )
        is_factor = sizes[1] == 1
        state = torch.zeros_like(all_added[0])
        states = []
        for number in range(self.num_chunks):
            if self.documents is not None:
                state = state.masked_fill(self.documents.is_reset[number][:, None, None, None], 0)
            states.append(state)
            factor = all_transitions[number]
            state = (factor * state if is_factor else factor @ state) + all_added[number]
        return torch.cat([states[number] for number in self.numbers])


def _all_gather(x: Tensor, shard: ContextShard) -> Tensor:
    """All ranks' `x`, in rank order along the first dim."""
    gathered = x.new_empty(shard.num_ranks * x.shape[0], *x.shape[1:])
    with collective(f"all-gather of chunks over the context axis, {shard.label}"):
        all_gather_single(gathered, x.contiguous(), group=shard.group)
    return gathered


def _reduce_scatter(x: Tensor, shard: ContextShard) -> Tensor:
    """This rank's part of the sum of all ranks' `x`."""
    part = x.new_empty(x.shape[0] // shard.num_ranks, *x.shape[1:])
    with collective(f"reduce-scatter of chunks over the context axis, {shard.label}"):
        reduce_scatter_single(part, x.contiguous(), group=shard.group)
    return part
