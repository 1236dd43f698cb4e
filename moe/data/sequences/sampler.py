"""The global batch of any step, as a pure function of (seed, step)."""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from moe.data.draws import permutation, seeded_generator
from moe.data.sequences.batch import GlobalSequenceBatch, global_batch
from moe.data.sequences.store import SequenceStore
from moe.spec import ConversationsSpec, DocumentsSpec, JobSpec

_DRAWS_OF_EPOCHS, _DRAWS_OF_PASSES = 0x5E9E, 0x5E9A
"""Streams of the draws of this file."""


class SequenceSampler:
    """Iterates over the rows of a store, epoch after epoch, each in a different order.

    Each source is read in repeated passes, each shuffled differently. From a source of n rows and weight w, an epoch
    takes the next w x n rows (rounded down, fractions carried over), shuffled with those of all other sources: with
    weights of 1, an epoch is every row once. Steps take rows in that order, and a batch may span two epochs.

    There is no state: any rank can compute any step directly, and a resumed run needs only the step number. An epoch's
    order is kept while it is used: 8 bytes per row.
    """

    def __init__(self, store: SequenceStore, spec: JobSpec) -> None:
        if store.num_rows == 0:
            raise ValueError("a sampler needs a store with rows")
        self._store, self._seed, self._estimates_kl = store, spec.train.seed, spec.estimates_kl
        self.num_groups = spec.num_groups
        self.rows_per_group = spec.group_tokens // store.max_tokens
        weights = _weights(spec)
        self._sources = [
            (start, end - start, Fraction(str(weights.get(name, 1.0))))  # exact for decimals such as 0.3
            for name, start, end in zip(store.sources, store.source_rows[:-1], store.source_rows[1:], strict=True)
            if end > start
        ]
        self._orders: dict[int, NDArray[np.int64]] = {}

    def batch(self, step: int) -> GlobalSequenceBatch:
        """The global batch of a step, the same on every machine."""
        num_rows = self.num_groups * self.rows_per_group
        first, row_chunks = step * num_rows, list[NDArray[np.int64]]()
        epoch = self.epoch_of(first)
        while (missing := num_rows - sum(map(len, row_chunks))) > 0:
            order = self._order(epoch)
            first_index = max(0, first - self.epoch_start(epoch))
            row_chunks.append(order[first_index : first_index + missing])
            epoch += 1
        rows = np.concatenate(row_chunks)
        return global_batch(
            self._store, step, rows, self.rows_per_group, self.num_groups, estimates_kl=self._estimates_kl
        )

    def epoch_start(self, epoch: int) -> int:
        """Number of rows drawn before an epoch (from 0) begins."""
        return sum(_num_rows_before(epoch, num_rows, weight) for _, num_rows, weight in self._sources)

    def epoch_of(self, number: int) -> int:
        """Epoch of the row `number`, counted over all epochs."""
        rows_per_epoch = sum(num_rows * weight for _, num_rows, weight in self._sources)
        # Epoch e starts at most e * rows_per_epoch rows in, and less than one row per source before that.
        low = int(number / rows_per_epoch)
        high = int((number + len(self._sources)) / rows_per_epoch) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epoch_start(middle) <= number else (low, middle)
        return low

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Rows of an epoch, shuffled. Those of the last two epochs are kept, since a batch may span both."""
        if epoch not in self._orders:
            rows = np.concatenate([self._epoch_rows(index, epoch) for index in range(len(self._sources))])
            order = rows[permutation(seeded_generator(self._seed, epoch, stream=_DRAWS_OF_EPOCHS), len(rows))]
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]

    def _epoch_rows(self, index: int, epoch: int) -> NDArray[np.int64]:
        """A source's rows of an epoch, in the order of its passes."""
        start, num_rows, weight = self._sources[index]
        begin, end = (_num_rows_before(boundary, num_rows, weight) for boundary in (epoch, epoch + 1))
        row_chunks = [np.zeros(0, np.int64)]
        for number in range(begin // num_rows, -(-end // num_rows)):
            generator = seeded_generator(self._seed, number, stream=_DRAWS_OF_PASSES, substream=index)
            order = permutation(generator, num_rows)
            first = number * num_rows
            row_chunks.append(start + order[max(0, begin - first) : end - first])
        return np.concatenate(row_chunks)


def _num_rows_before(epoch: int, num_rows: int, weight: Fraction) -> int:
    """Number of a source's rows that epochs before this one take."""
    return int(epoch * num_rows * weight)


def _weights(spec: JobSpec) -> Mapping[str, float]:
    """Weights by source; 1 if omitted."""
    return spec.data.source_weights if isinstance(spec.data, DocumentsSpec | ConversationsSpec) else {}
