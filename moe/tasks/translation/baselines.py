"""Baselines: a unigram model and the most frequent target of the training pairs."""

import numpy as np
from numpy.typing import NDArray

from moe.data.pairs import TokenStore


def unigram_logp(store: TokenStore, vocab_size: int) -> NDArray[np.float64]:
    """`[V]`: log-probabilities of target tokens by training frequency (add-one)."""
    counts = np.ones(vocab_size)
    for rows, length in _by_length(store):
        counts += np.bincount(store.pad_rows("target", rows, length).reshape(-1), minlength=vocab_size)
    return np.asarray(np.log(counts / counts.sum()))


def most_frequent_target(store: TokenStore) -> str:
    """Text of the most frequent target; the first one on ties."""
    best_count, best_row = 0, 0
    for rows, length in _by_length(store):
        ids = store.pad_rows("target", rows, length)
        _, firsts, counts = np.unique(ids, axis=0, return_index=True, return_counts=True)
        count, row = int(counts.max()), int(rows[firsts[counts == counts.max()]].min())
        if count > best_count or (count == best_count and row < best_row):
            best_count, best_row = count, row
    return store.text(best_row)[1]


def _by_length(store: TokenStore) -> list[tuple[NDArray[np.int64], int]]:
    """(rows, length) for each target length, to batch rows without padding."""
    lengths = np.asarray(store.target_lengths)
    order = np.argsort(lengths, kind="stable")
    values, starts = np.unique(lengths[order], return_index=True)
    return [(rows, int(length)) for rows, length in zip(np.split(order, starts[1:]), values, strict=True)]
