"""The global batch of a step, and the part of it that one rank computes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe.data.batch import GlobalBatch
from moe.data.pairs.store import TokenStore
from moe.data.tokenizer import BOS, PAD


@dataclass(frozen=True)
class PairBatchPart:
    """Rows of whole consecutive groups; `b` rows, 0 for a rank that has no group."""

    first_row: int
    """Index of the first row in the global batch, which keys random draws."""
    source: NDArray[np.int64]
    """[b, L], each row ends in EOS, then PAD."""
    target_in: NDArray[np.int64]
    """[b, N], BOS and the target."""
    target_out: NDArray[np.int64]
    """[b, N], labels: the target and EOS."""


@dataclass(frozen=True, kw_only=True)
class GlobalPairBatch(GlobalBatch):
    """Pairs of one length class."""

    source_length: int
    """L"""
    target_length: int
    """N"""
    num_source_tokens: int
    """Real source tokens of the whole batch, each EOS included."""
    num_target_tokens: int
    """Real labels of the whole batch, each EOS included: the divisor of the loss."""
    store: TokenStore = field(repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.num_source_tokens + self.num_target_tokens

    @property
    def num_positions(self) -> int:
        """B x (L + N), padding included."""
        return len(self.rows) * (self.source_length + self.target_length)

    def part(self, first_group: int, stop_group: int) -> PairBatchPart:
        """The rows of groups `first_group` to `stop_group` (exclusive)."""
        first_row, rows = self.rows_of(first_group, stop_group)
        target_out = self.store.pad_rows("target", rows, self.target_length)
        # Inputs are the labels, one position later. The EOS after the last word is left out, so that an input is PAD
        # exactly where its label is.
        target_in = np.full_like(target_out, BOS)
        target_in[:, 1:] = target_out[:, :-1]
        target_in[target_out == PAD] = PAD
        return PairBatchPart(first_row, self.store.pad_rows("source", rows, self.source_length), target_in, target_out)


def global_batch(
    store: TokenStore, step: int, rows: NDArray[np.int64], source_length: int, target_length: int,
    rows_per_group: int, num_groups: int,
) -> GlobalPairBatch:  # fmt: skip
    """Build the batch of these rows, and count its tokens."""
    return GlobalPairBatch(
        step=step,
        rows=rows,
        source_length=source_length,
        target_length=target_length,
        rows_per_group=rows_per_group,
        num_groups=num_groups,
        num_source_tokens=int(store.source_lengths[rows].sum()),
        num_target_tokens=int(store.target_lengths[rows].sum()),
        store=store,
    )
