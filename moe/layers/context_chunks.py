"""Recurrences along rows that are split over context ranks: what a chunk needs from the chunks before it.

A row of L positions is 2c chunks of ceil(L / 2c) positions over c context ranks; the last chunks may be shorter, or
empty. Rank i has chunks i and 2c - 1 - i, as causal attention is balanced by.

Shapes: B rows, L positions, N of them on this rank, s positions of a chunk. A rank's two chunks are stacked as rows:
`[2B, s, ...]`, the first chunk's rows first, with zeros after a row's end.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe.layers.chunks import document_starts
from moe.parallel.collective import all_gather_single, collective, reduce_scatter_single


@dataclass(frozen=True)
class ContextChunks:
    """This rank's two chunks of rows that are split over context ranks."""

    num_positions: int
    """L."""
    group: dist.ProcessGroup
    """Context ranks."""
    documents: Tensor | None = None
    """int `[B, L]`: document of each position of the whole rows, -1 for padding; None: each row is one document."""
    label: str = "between layers"
    """Name of the layer in errors of collectives."""

    @property
    def num_chunks(self) -> int:
        """2c: chunks of a row."""
        return 2 * self.group.size()

    @property
    def chunk_size(self) -> int:
        """s: positions of a full chunk, at least 1."""
        return max(1, -(-self.num_positions // self.num_chunks))

    @property
    def own(self) -> tuple[int, int]:
        """Numbers of this rank's chunks."""
        return self.group.rank(), self.num_chunks - 1 - self.group.rank()

    @property
    def lengths(self) -> tuple[int, int]:
        """Positions of this rank's chunks, N in all."""
        first, second = (max(0, min(self.chunk_size, self.num_positions - i * self.chunk_size)) for i in self.own)
        return first, second

    def stack(self, x: Tensor) -> Tensor:
        """`[2B, s, ...]` from this rank's positions `[B, N, ...]`."""
        padding = (0, 0) * (x.dim() - 2)
        return torch.cat(
            [functional.pad(part, (*padding, 0, self.chunk_size - part.shape[1])) for part in x.split(self.lengths, 1)]
        )

    def unstack(self, x: Tensor) -> Tensor:
        """This rank's positions `[B, N, ...]` from `[2B, s, ...]`."""
        return torch.cat([part[:, :length] for part, length in zip(x.chunk(2), self.lengths, strict=True)], dim=1)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather one tensor per row of each chunk, `[2B, ...]`, into `[2c, B, ...]` in the order of positions. The
        backward pass sums the gradients of all ranks (reduce-scatter)."""
        gathered: Tensor = _GatherRanks.apply(x, self.group, self.label)
        by_rank = gathered.unflatten(0, (-1, 2, x.shape[0] // 2))
        return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0)))

    def take(self, by_chunk: Tensor) -> Tensor:
        """This rank's part `[2B, ...]` of `[2c, B, ...]`."""
        return torch.cat([by_chunk[number] for number in self.own])

    @cached_property
    def stacked_documents(self) -> Tensor | None:
        """int `[2B, s]`: documents of this rank's chunks, -1 after a row's end."""
        return None if self._documents_by_chunk is None else self.take(self._documents_by_chunk)

    @cached_property
    def _documents_by_chunk(self) -> Tensor | None:
        """int `[2c, B, s]`."""
        if self.documents is None:
            return None
        return self._by_chunk(self.documents, -1)

    @cached_property
    def begins_document(self) -> Tensor | None:
        """bool `[2c, B]`: the first real position of a chunk is in another document than the last one before it."""
        if self._documents_by_chunk is None:
            return None
        assert self.documents is not None
        is_real = self._documents_by_chunk >= 0
        is_first = is_real & (is_real.cumsum(dim=-1) == 1)
        return (is_first & self._by_chunk(document_starts(self.documents), False)).any(dim=-1)

    def _by_chunk(self, x: Tensor, padding: int | bool) -> Tensor:
        """`[2c, B, s]` from `[B, L]`."""
        missing = self.num_chunks * self.chunk_size - self.num_positions
        return functional.pad(x, (0, missing), value=padding).unflatten(1, (self.num_chunks, -1)).transpose(0, 1)

    def with_positions_before(self, x: Tensor, num_before: int) -> Tensor:
        """`[2B, num_before + s, ...]`: the chunks `x` `[2B, s, ...]`, each after the positions before it; zeros before
        a row. All-gathers the last positions of each chunk."""
        if num_before == 0:
            return x
        size = min(num_before, self.chunk_size)
        tails = self.gather(x[:, self.chunk_size - size :]).transpose(0, 1).flatten(1, 2)  # [B, 2c * size, ...]
        tails = functional.pad(tails, (*(0, 0) * (x.dim() - 2), num_before, 0))
        before = torch.cat([tails.narrow(1, number * size, num_before) for number in self.own])
        return torch.cat((before, x), dim=1)

    def documents_with_positions_before(self, num_before: int) -> Tensor | None:
        """int `[2B, num_before + s]`: documents of `with_positions_before`, -1 before a row."""
        if self.documents is None:
            return None
        missing = self.num_chunks * self.chunk_size - self.num_positions
        padded = functional.pad(self.documents, (num_before, missing), value=-1)
        return torch.cat([padded.narrow(1, i * self.chunk_size, num_before + self.chunk_size) for i in self.own])

    def states_before(self, transition: Tensor, added: Tensor) -> Tensor:
        """Return the state before each of this rank's chunks, `[2B, h, dk, dv]`, where a chunk turns state S into
        `transition` · S + `added`; zeros where a document begins.

        `added` is `[2B, h, dk, dv]`; `transition` are matrices `[2B, h, dk, dk]`, or factors `[2B, h, 1, 1]`. They are
        all-gathered, so the ranks compute their chunks at the same time: passed on from chunk to chunk, states would
        take the time of one rank with the whole row. Attention by heads would exchange every position's queries, keys
        and values instead, which are more from some hundred positions per rank.
        """
        packed = self.gather(torch.cat((added.flatten(2), transition.flatten(2)), dim=-1))
        gathered_added, gathered_transitions = packed.split(
            (added.shape[2:].numel(), transition.shape[2:].numel()), dim=-1
        )
        is_factor = transition.shape[2:].numel() == 1
        state = added.new_zeros(added.shape[0] // 2, *added.shape[1:])
        states = []
        for number in range(self.num_chunks):
            if self.begins_document is not None:
                state = state.masked_fill(self.begins_document[number][:, None, None, None], 0)
            states.append(state)
            chunk_transition = gathered_transitions[number].unflatten(-1, transition.shape[2:])
            moved = chunk_transition * state if is_factor else chunk_transition @ state
            state = moved + gathered_added[number].unflatten(-1, added.shape[2:])
        return torch.cat([states[number] for number in self.own])


class _GatherRanks(torch.autograd.Function):
    """All-gather along the first dim; reduce-scatter of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, label: str) -> Tensor:
        ctx.settings = group, label
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        with collective(f"all-gather of chunks over the context axis, {label}"):
            all_gather_single(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        group, label = ctx.settings
        gradient = gradients[0].contiguous()
        own = gradient.new_empty(gradient.shape[0] // group.size(), *gradient.shape[1:])
        with collective(f"reduce-scatter of chunks over the context axis, {label}"):
            reduce_scatter_single(own, gradient, group=group)
        return own, None, None
