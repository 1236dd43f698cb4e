"""The global batch of any step, as a pure function of (seed, step)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe.data.draws import permutation, seeded_generator, uniform
from moe.data.pairs.batch import GlobalPairBatch, global_batch
from moe.data.pairs.buckets import plan_buckets
from moe.data.pairs.store import TokenStore
from moe.spec import JobSpec, PairsSpec

_DRAWS_OF_BATCHES = 0xDA7A
"""Stream of the draws of this file."""


@dataclass(frozen=True)
class _Class:
    """A length class ready to draw from."""

    source_length: int
    target_length: int
    rows_per_group: int
    members: NDArray[np.int64]
    cumulative: NDArray[np.float64]
    """[members], running sum of their probabilities of being drawn, up to that of the class."""


class Sampler:
    """Draws batches with replacement, every pair at the rate that its language's temperature gives it.

    A language of n pairs has a weight of n ** sampling_exponent (arXiv 1907.05019), shared evenly by its pairs. A batch
    takes all its rows from one length class, drawn in proportion to its weight divided by the rows that fit in a group,
    so over many steps pairs appear at exactly their weights, regardless of the classes.

    There is no state: any rank can compute any step directly, and a resumed run needs only the step number.
    """

    def __init__(self, store: TokenStore, spec: JobSpec) -> None:
        if store.num_pairs == 0:
            raise ValueError("a sampler needs a store with pairs")
        self._store = store
        self._seed = spec.train.seed
        group_tokens = spec.group_tokens
        self.num_groups = spec.num_groups
        assert isinstance(spec.data, PairsSpec)
        weights = self.pair_weights(store, spec.data.sampling_exponent)
        self._classes = [
            _Class(
                source_length=bucket.source_length,
                target_length=bucket.target_length,
                rows_per_group=group_tokens // (bucket.source_length + bucket.target_length),
                members=bucket.members,
                cumulative=np.cumsum(weights[bucket.members]),
            )
            for bucket in plan_buckets(
                store.source_lengths, store.target_lengths, weights, group_tokens, self.num_groups
            )
        ]
        # Relative rate of batches of a class: its weight divided by the pairs in one batch.
        rate = np.array([c.cumulative[-1] / (c.rows_per_group * self.num_groups) for c in self._classes])
        self._class_cumulative = np.cumsum(rate / rate.sum())

    @staticmethod
    def pair_weights(store: TokenStore, exponent: float) -> NDArray[np.float64]:
        """[num_pairs], each pair's probability of being drawn; they sum to 1."""
        pairs_of_lang = np.bincount(store.lang_ids, minlength=len(store.langs))
        share = np.where(pairs_of_lang > 0, np.maximum(pairs_of_lang, 1) ** float(exponent), 0.0)
        share_of_pair = share / share.sum() / np.maximum(pairs_of_lang, 1)
        return np.asarray(share_of_pair[store.lang_ids])

    def batch(self, step: int) -> GlobalPairBatch:
        """The global batch of a step, the same on every machine."""
        generator = seeded_generator(self._seed, step, stream=_DRAWS_OF_BATCHES)
        class_index = np.searchsorted(self._class_cumulative, uniform(generator, 1)[0], side="right")
        batch_class = self._classes[min(int(class_index), len(self._classes) - 1)]
        num_rows = batch_class.rows_per_group * self.num_groups
        # One draw from each of B equal strata of the class. Members are in order of language, so a batch has close to
        # each language's share, and a pair lighter than a stratum is drawn twice only if it spans two.
        strata = (np.arange(num_rows) + uniform(generator, num_rows)) / num_rows
        member_indices = np.searchsorted(batch_class.cumulative, strata * batch_class.cumulative[-1], side="right")
        rows = batch_class.members[np.minimum(member_indices, len(batch_class.members) - 1)]
        # Groups are routed separately, so each must be a mixture too.
        rows = rows[permutation(generator, num_rows)]
        return global_batch(
            self._store, step, rows, batch_class.source_length, batch_class.target_length,
            batch_class.rows_per_group, self.num_groups,
        )  # fmt: skip
