"""Every pair of a held-out set once, in batches of similar lengths."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moe.data.draws import permutation, seeded_generator
from moe.data.pairs.batch import GlobalPairBatch, global_batch
from moe.data.pairs.store import TokenStore

_DRAWS_OF_SUBSETS = 0xE7A1
"""Number of the generator that chooses subsets."""


def evaluation_batches(
    store: TokenStore, max_tokens: int, max_pairs: int | None = None, seed: int = 0
) -> Iterator[GlobalPairBatch]:
    """Batches of at most `max_tokens` positions, shortest first; a longer pair is a batch of its own.

    With `max_pairs`, a subset of that size that depends only on `seed`; larger subsets include smaller ones. Every row
    is its own group (R = 1), so that ranks can divide a batch anywhere.
    """
    rows = _subset(store.num_pairs, max_pairs, seed)
    source_lengths, target_lengths = store.source_lengths[rows], store.target_lengths[rows]
    # By the longer side, which was measured to pad less than either side or their sum.
    longer = np.maximum(source_lengths, target_lengths)
    in_order = np.lexsort((rows, source_lengths + target_lengths, longer))
    rows, source_lengths, target_lengths = rows[in_order], source_lengths[in_order], target_lengths[in_order]
    number, start = 0, 0
    while start < len(rows):
        # The longest run from `start` that still fits, padding included.
        tallest = np.maximum.accumulate(source_lengths[start : start + max_tokens])
        widest = np.maximum.accumulate(target_lengths[start : start + max_tokens])
        positions = (tallest + widest) * np.arange(1, len(tallest) + 1)
        num_rows = max(1, int(np.searchsorted(positions, max_tokens, side="right")))
        yield global_batch(
            store, number, rows[start : start + num_rows],
            int(tallest[num_rows - 1]), int(widest[num_rows - 1]), rows_per_group=1, num_groups=num_rows,
        )  # fmt: skip
        number, start = number + 1, start + num_rows


def _subset(num_pairs: int, max_pairs: int | None, seed: int) -> NDArray[np.int64]:
    rows = np.arange(num_pairs)
    if max_pairs is None or max_pairs >= num_pairs:
        return rows
    return permutation(seeded_generator(seed, _DRAWS_OF_SUBSETS), num_pairs)[:max_pairs]
