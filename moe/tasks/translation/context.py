"""Context of a batch of sentence pairs: random key and rows."""

from dataclasses import dataclass

from torch import Tensor

from moe.routing import BatchCounts


@dataclass(frozen=True)
class BatchContext:
    """Random key of a batch, and its rows per token group."""

    step: int | Tensor = 0
    """Python int or int64 scalar."""
    seed: int = 0
    training: bool = True
    first_row: int = 0
    """Index of the first row in the global batch."""
    rows_per_group: int | None = None
    """R: consecutive rows per token group, on both sides: encoder groups have R·L positions, decoder groups R·N.

    None: as many as fit L + N into the spec's `group_tokens`.
    """
    source_counts: BatchCounts | None = None
    """Counts of the global batch's sources; None: these are all of it."""
    target_counts: BatchCounts | None = None
