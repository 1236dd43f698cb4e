"""Identity of a batch, and this rank's rows in it."""

from dataclasses import dataclass

from torch import Tensor

from moe.routing import BatchCounts


@dataclass(frozen=True)
class BatchContext:
    """The key of every random choice that a batch meets, and how its rows form groups."""

    step: int | Tensor = 0
    """A number, or an int64 scalar."""
    seed: int = 0
    training: bool = True
    first_row: int = 0
    """Index in the global batch of the first row given."""
    rows_per_group: int | None = None
    """R. A group is R whole rows in order, on both sides, so an encoder layer routes groups of R·L positions and
    a decoder layer groups of R·N. Left out: as many as the spec's `group_tokens` holds of L + N."""
    source_counts: BatchCounts | None = None
    """Of the sources of the global batch; left out, these are all of it."""
    target_counts: BatchCounts | None = None
