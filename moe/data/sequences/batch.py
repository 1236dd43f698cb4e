"""The global batch of a step, and the part of it that one rank computes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe.data.batch import GlobalBatch
from moe.data.sequences.store import SequenceStore
from moe.data.sequences.unpaired import UnpairedPart


@dataclass(frozen=True)
class SequenceBatchPart:
    """Rows of whole consecutive groups; `b` rows of L positions, 0 for a rank that has no group."""

    first_row: int
    """Index of the first row in the global batch, which keys random draws."""
    tokens: NDArray[np.int64]
    """[b, L], inputs; PAD where padded."""
    documents: NDArray[np.int32]
    """[b, L], index of each position's piece in its row, from 0; -1 where padded."""
    labels: NDArray[np.int64]
    """[b, L], labels; -1 where padded or not learned."""
    unpaired: UnpairedPart | None = None
    """Labels of answers, if the corpus has them."""


@dataclass(frozen=True, kw_only=True)
class GlobalSequenceBatch(GlobalBatch):
    """Packed sequences."""

    num_targets: int
    """Labels of the whole batch, or its pairs or labelled answers: the divisor of the loss."""
    num_tokens: int
    """Positions of the whole batch that are not padded."""
    store: SequenceStore = field(repr=False, compare=False)
    estimates_kl: bool = False
    """Whether parts have rows of mismatched prompts and completions."""

    @property
    def num_positions(self) -> int:
        """B x L, padding included."""
        return len(self.rows) * self.store.max_tokens

    def part(self, first_group: int, stop_group: int) -> SequenceBatchPart:
        """The rows of groups `first_group` to `stop_group` (exclusive)."""
        first_row, rows = self.rows_of(first_group, stop_group)
        unpaired = None
        if self.store.has_labels:
            previous = np.roll(self.rows, 1)[first_row : first_row + len(rows)]
            unpaired = UnpairedPart.from_rows(self.store, rows, previous, estimates_kl=self.estimates_kl)
        return SequenceBatchPart(first_row, *self.store.rows(rows), unpaired)


def global_batch(
    store: SequenceStore,
    step: int,
    rows: NDArray[np.int64],
    rows_per_group: int,
    num_groups: int,
    *,
    estimates_kl: bool = False,
) -> GlobalSequenceBatch:
    """Build the batch of these rows, and count its labels and tokens."""
    return GlobalSequenceBatch(
        step=step,
        rows=rows,
        rows_per_group=rows_per_group,
        num_groups=num_groups,
        num_targets=int(store.row_targets[rows].sum()),
        num_tokens=int(store.row_lengths[rows].sum()),
        store=store,
        estimates_kl=estimates_kl,
    )
