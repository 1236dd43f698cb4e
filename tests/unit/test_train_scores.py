"""Scores from row statistics equal those of sacrebleu's public functions on any subset."""

import numpy as np
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from moe.records import TranslationScores
from moe.tasks.translation.scores import RowStatistics

WORDS = ("the", "cat", "%(n)s", "été", "Привет", ",", ".", "42", "mat")
words = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


@given(st.lists(st.tuples(words, words.filter(bool), st.booleans()), min_size=1, max_size=8))
def test_equal_sacrebleus_own(rows):
    hypotheses, references, flags = (list(column) for column in zip(*rows, strict=True))
    statistics = RowStatistics.from_texts(hypotheses, references)
    halves = [RowStatistics.from_texts(hypotheses[a:b], references[a:b]) for a, b in ((0, 1), (1, len(rows)))]
    for mask in (np.ones(len(rows), bool), np.array(flags)):
        texts = [list(np.array(column, object)[mask]) for column in (hypotheses, references)]
        if not texts[0]:
            assert statistics.select(mask).scores() == TranslationScores(chrf=None, bleu=None)
            continue
        expected = TranslationScores(
            chrf=round(sacrebleu.corpus_chrf(texts[0], [texts[1]]).score, 2),
            bleu=round(sacrebleu.corpus_bleu(texts[0], [texts[1]], force=True).score, 2),
        )
        assert statistics.select(mask).scores() == expected
        assert RowStatistics.concatenate(halves).select(mask).scores() == expected


def test_a_perfect_translation_scores_100():
    text = ["a perfectly good sentence", "and one more of them"]
    assert RowStatistics.from_texts(text, text).scores() == TranslationScores(chrf=100.0, bleu=100.0)
