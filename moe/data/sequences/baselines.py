"""Baselines without learning, for held-out text: frequencies of tokens, and a compressor."""

import lzma
from collections.abc import Iterable

import numpy as np

from moe.data.sequences.store import SequenceStore

_BEST = 9 | lzma.PRESET_EXTREME
_MIN_DICTIONARY = 4096
"""Bytes; the format's own bound."""


def unigram_nats_per_source(
    train: SequenceStore, held_out: dict[str, SequenceStore], num_ids: int
) -> dict[str, float | None]:
    """Nats per label by held-out source, from label frequencies in training with one added for each of `num_ids` ids;
    None for a source without labels."""
    counts = train.label_counts(num_ids) + 1
    logp = np.log(counts / counts.sum())
    nats_by_source: dict[str, float | None] = {}
    for name, store in held_out.items():
        labels = store.label_counts(num_ids)
        nats_by_source[name] = float(-(labels @ logp) / labels.sum()) if labels.sum() else None
    return nats_by_source


def xz_bits_per_byte(texts: Iterable[bytes]) -> float | None:
    """Bits per byte of texts compressed by xz at its best setting, each separately, as a model reads them; None without
    text."""
    num_bytes = num_compressed = 0
    for text in texts:
        num_bytes += len(text)
        # By default each text would get a dictionary of 64 MiB, which takes 60 ms to set up.
        filters = [{"id": lzma.FILTER_LZMA2, "preset": _BEST, "dict_size": max(_MIN_DICTIONARY, len(text))}]
        num_compressed += len(lzma.compress(text, filters=filters))
    return 8 * num_compressed / num_bytes if num_bytes else None
