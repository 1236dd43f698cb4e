"""Tokens that close answers, and so stop the generation of a model tuned on them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from moe.data.sequences.encoding import EncodedDocument
from moe.data.tokenizer import Tokenizer

_SHARE = 0.01
"""Smallest share of answers that a special token must close to stop generation: one that a user typed closes few."""


class ClosingTokens:
    """Counts of the special tokens that close answers, with only white space learned after them."""

    def __init__(self, tokenizer: Tokenizer, ends: Iterable[int]) -> None:
        """`ends`: ids of the tokens that already stop generation."""
        self._ends = frozenset(ends)
        self._closing = tokenizer.special_ids | self._ends
        self._counts, self._num_answers = Counter[int](), 0

    def add(self, encoded_document: EncodedDocument) -> None:
        """Count the closing tokens of a document: of each span, or of the last one if the template marks the spans."""
        document = encoded_document.document
        assert document.spans is not None
        assert encoded_document.ends is not None
        for begin, end in document.spans[-1:] if document.by_marks else document.spans:
            place = begin + len(document.text[begin:end].rstrip())
            token_index = int(np.searchsorted(encoded_document.ends, place))
            if place == begin or token_index == len(encoded_document.ids):  # cut before its end
                continue
            self._num_answers += 1
            if (id := int(encoded_document.ids[token_index])) in self._closing:
                self._counts[id] += 1

    def new_end_ids(self) -> list[int]:
        """Ids of frequent closing tokens that do not stop generation yet, the most frequent first."""
        min_count = _SHARE * self._num_answers
        return [id for id, count in self._counts.most_common() if id not in self._ends and count >= min_count]

    def facts(self) -> dict[str, Any]:
        """Number of answers learned to their end, number of those closed by a token, and the new end ids."""
        return {"answers": self._num_answers, "closed": self._counts.total(), "closers": self.new_end_ids()}
