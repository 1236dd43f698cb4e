"""Tokens that close answers: what a model that was tuned on them ends a text with."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from moe.data.sequences.encoding import EncodedDocument
from moe.data.tokenizer import Tokenizer

_SHARE = 0.01
"""Of the answers that a special token must close, to be taken for an end: one that a user wrote out closes few."""


class Closers:
    """Special tokens behind which nothing but white space is learned, counted."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        """`ends`: ids of the tokens that end a text anyway."""
        self._ends = frozenset(ends)
        self._closing = tokenizer.special_ids | self._ends
        self._counts, self._num_answers = Counter[int](), 0

    def add(self, encoded: EncodedDocument) -> None:
        """Count the closers of a document with spans: of each answer, or of the last part that a template marks."""
        document = encoded.document
        assert document.spans is not None
        assert encoded.ends is not None
        for begin, end in document.spans[-1:] if document.by_marks else document.spans:
            place = begin + len(document.text[begin:end].rstrip())
            at = int(np.searchsorted(encoded.ends, place))
            if place == begin or at == len(encoded.ids):  # cut before its end
                continue
            self._num_answers += 1
            if (id := int(encoded.ids[at])) in self._closing:
                self._counts[id] += 1

    def further(self) -> list[int]:
        """Ids of those that are no ends yet, the most frequent first."""
        least = _SHARE * self._num_answers
        return [id for id, count in self._counts.most_common() if id not in self._ends and count >= least]

    def facts(self) -> dict[str, Any]:
        """Answers that were learned up to their ends, and those of them that a token closes."""
        return {"answers": self._num_answers, "closed": self._counts.total(), "closers": self.further()}
