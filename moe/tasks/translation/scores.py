"""chrF and BLEU on subsets of rows, from per-row sufficient statistics.

Uses sacrebleu's private functions, so that ranks measure their own rows and subset scores equal its `corpus_score`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from moe.records import TranslationScores

_CHRF = CHRF()
_BLEU = BLEU(force=True)  # tokenized-looking texts are intended: no warning


@dataclass(frozen=True)
class RowStatistics:
    """n-gram counts of each row: integers, so sums over rows and ranks are exact."""

    chrf: NDArray[np.int64]
    """[rows, 18]: for each of 6 character orders, n-grams in the hypothesis, in the reference, in both."""
    bleu: NDArray[np.int64]
    """[rows, 10]: lengths of both, then matches of 4 word orders, then totals of 4 word orders."""

    @classmethod
    def from_texts(cls, hypotheses: Sequence[str], references: Sequence[str]) -> "RowStatistics":
        """Statistics of each hypothesis and its reference."""
        if not hypotheses:
            return cls(np.zeros((0, 18), np.int64), np.zeros((0, 10), np.int64))
        return cls(
            np.array(_CHRF._extract_corpus_statistics(hypotheses, [references]), np.int64),
            np.array(_BLEU._extract_corpus_statistics(hypotheses, [references]), np.int64),
        )

    def to_plain(self) -> tuple[list[list[int]], list[list[int]]]:
        return self.chrf.tolist(), self.bleu.tolist()

    @classmethod
    def from_plain(cls, chrf: list[list[int]], bleu: list[list[int]]) -> "RowStatistics":
        """Inverse of `to_plain`."""
        return cls(np.array(chrf, np.int64).reshape(-1, 18), np.array(bleu, np.int64).reshape(-1, 10))

    @classmethod
    def concatenate(cls, parts: Sequence["RowStatistics"]) -> "RowStatistics":
        return cls(np.concatenate([part.chrf for part in parts]), np.concatenate([part.bleu for part in parts]))

    def select(self, rows: NDArray[Any]) -> "RowStatistics":
        """Statistics of the rows selected by a mask or indices."""
        return RowStatistics(self.chrf[rows], self.bleu[rows])

    def scores(self) -> TranslationScores:
        """Corpus scores of the rows."""
        if not len(self.chrf):
            return TranslationScores(chrf=None, bleu=None)
        return TranslationScores(
            chrf=round(_CHRF._aggregate_and_compute([self.chrf.sum(0).tolist()]).score, 2),
            bleu=round(_BLEU._aggregate_and_compute([self.bleu.sum(0).tolist()]).score, 2),
        )
