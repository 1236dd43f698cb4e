"""Identity of a batch of sequences, and this rank's rows in it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.routing import BatchCounts


@dataclass(frozen=True)
class SequenceContext:
    """The key of every random choice that a batch meets, how its rows form groups, and the documents in them."""

    documents: Tensor | None = None
    """int `[B, L]`: each position's document, counted in its row, -1 for padding. Positions begin anew in each, and no
    document sees another. Left out, each row is one."""
    step: int | Tensor = 0
    seed: int = 0
    training: bool = True
    first_row: int = 0
    """Index in the global batch of the first row given."""
    rows_per_group: int | None = None
    """Whole rows in order that are routed together; left out, as many as the spec's `group_tokens` holds."""
    counts: BatchCounts | None = None
    """Of the global batch; left out, these rows are all of it."""

    @property
    def padding(self) -> Tensor | None:
        """bool `[B, L]`, True where padded; None where nothing is."""
        return None if self.documents is None else self.documents < 0

    def within(self, documents: Tensor | None) -> "SequenceContext":
        """The same, of rows that have these documents."""
        return replace(self, documents=documents)


def positions_of(documents: Tensor) -> Tensor:
    """int64 `[B, L]`: each position's place in its document; padding counts as documents of its own."""
    num_positions = documents.shape[1]
    place = torch.arange(num_positions, device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(begins, place, 0).cummax(dim=1).values


def lengths_of(positions: Tensor) -> Tensor:
    """int64 `[B, L]`: the length of each position's document, from its place there (`positions_of`)."""
    document = (positions == 0).cumsum(dim=1) - 1
    lengths = torch.zeros_like(positions).scatter_reduce_(1, document, positions + 1, "amax")
    return lengths.gather(1, document)
