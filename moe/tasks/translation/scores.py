"""chrF and BLEU of any subset of rows, from statistics that are taken once for each row.

This file alone touches sacrebleu's private parts: the statistics of a row, and the score of their sum. So
rows are measured on the rank that translated them, and every subset's score is that of sacrebleu's
`corpus_score`.
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
_BLEU = BLEU(force=True)  # texts that look tokenised are meant as they are; no warning about them


@dataclass(frozen=True)
class RowStatistics:
    """n-gram counts of each row: integers, which add up over rows and ranks without rounding."""

    chrf: NDArray[np.int64]
    """[rows, 18]: for each of 6 character orders, n-grams of the hypothesis, of the reference, in both."""
    bleu: NDArray[np.int64]
    """[rows, 10]: lengths of both, then for each of 4 word orders the matches, then the totals."""

    @classmethod
    def from_texts(cls, hypotheses: Sequence[str], references: Sequence[str]) -> "RowStatistics":
        """The statistics of each hypothesis beside its reference."""
        if not hypotheses:
            return cls(np.zeros((0, 18), np.int64), np.zeros((0, 10), np.int64))
        return cls(
            np.array(_CHRF._extract_corpus_statistics(hypotheses, [references]), np.int64),
            np.array(_BLEU._extract_corpus_statistics(hypotheses, [references]), np.int64),
        )

    def to_plain(self) -> tuple[list[list[int]], list[list[int]]]:
        return self.chrf.tolist(), self.bleu.tolist()

    @classmethod
    def of_plain(cls, chrf: list[list[int]], bleu: list[list[int]]) -> "RowStatistics":
        """Scores from the plain values of `to_plain`."""
        return cls(np.array(chrf, np.int64).reshape(-1, 18), np.array(bleu, np.int64).reshape(-1, 10))

    @classmethod
    def concatenate(cls, parts: Sequence["RowStatistics"]) -> "RowStatistics":
        return cls(
            np.concatenate([part.chrf for part in parts]), np.concatenate([part.bleu for part in parts])
        )

    def at(self, rows: NDArray[Any]) -> "RowStatistics":
        """Statistics of the rows that a mask or indices select."""
        return RowStatistics(self.chrf[rows], self.bleu[rows])

    def scores(self) -> TranslationScores:
        """Scores of the rows as one corpus."""
        if not len(self.chrf):
            return TranslationScores(chrf=None, bleu=None)
        return TranslationScores(
            chrf=round(_CHRF._aggregate_and_compute([self.chrf.sum(0).tolist()]).score, 2),
            bleu=round(_BLEU._aggregate_and_compute([self.bleu.sum(0).tolist()]).score, 2),
        )
