"""Context of a batch of token rows: random key, rows, token groups and documents."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe.parallel import Layout, SequenceShard
from moe.parallel.accelerator import accelerator
from moe.routing import BatchCounts


@dataclass(frozen=True)
class BatchContext:
    """Random key of a batch, its rows per token group, and its packed documents."""

    step: int | Tensor = 0
    """Python int or int64 scalar."""
    seed: int = 0
    training: bool = True
    first_row: int | Tensor = 0
    """Index of the first row in the global batch: an integer, or an int64 scalar."""
    rows_per_group: int | None = None
    """R: consecutive rows per token group, in both stacks of an encoder-decoder model: its encoder's groups have R·L
    positions, its decoder's R·N. None: as many as fit into the spec's `group_tokens`."""
    counts: BatchCounts | None = None
    """Counts of the global batch's rows (an encoder-decoder model's targets); None: these rows are the whole batch."""
    source_counts: BatchCounts | None = None
    """Counts of the global batch's sources, for an encoder."""
    documents: Tensor | None = None
    """int `[B, L]`: document index of each position within its row, -1 for padding; None: one per row.

    Positions restart in each document; attention stays within documents. Decoder-only models.
    """

    @property
    def padding(self) -> Tensor | None:
        """bool `[B, L]`, True at padding; None without padding."""
        return None if self.documents is None else self.documents < 0

    def with_documents(self, documents: Tensor | None) -> "BatchContext":
        """Copy with these documents."""
        return replace(self, documents=documents)


def label_positions(labels: np.ndarray, ignore_index: int, layout: Layout) -> Tensor:
    """int64 `[n]`: positions that predict a token within this rank's share of `labels` `[b, L]`, in the layout's device
    memory. Found on the host, which would wait for a GPU to count them."""
    num_rows, num_positions = labels.shape
    shard = SequenceShard.of_rows(num_rows, num_positions, layout.group("tensor"), layout.group("context"))
    share = shard.take(torch.from_numpy(labels.reshape(-1)))
    return accelerator(layout.device).take((share != ignore_index).nonzero().squeeze(1))


def positions_of(documents: Tensor) -> Tensor:
    """int64 `[B, L]`: position of each token within its document; runs of padding count as documents."""
    num_positions = documents.shape[1]
    place = torch.arange(num_positions, device=documents.device).expand(documents.shape)
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(is_start, place, 0).cummax(dim=1).values


def lengths_of(positions: Tensor) -> Tensor:
    """int64 `[B, L]`: length of each position's document, from its `positions_of`."""
    document = (positions == 0).cumsum(dim=1) - 1
    lengths = torch.zeros_like(positions).scatter_reduce_(1, document, positions + 1, "amax")
    return lengths.gather(1, document)
