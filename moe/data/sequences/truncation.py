"""Truncation of conversations to a sequence, with counts."""

from collections.abc import Sequence

import numpy as np

from moe.data.sequences.encoding import EncodedDocument


class Truncation:
    """Truncates documents with spans at their ends, and leaves out those of which nothing is learned then."""

    def __init__(self, max_tokens: int, num_linked: int = 1) -> None:
        """`num_linked`: number of documents that belong together and share a sequence of `max_tokens` positions."""
        self._max_ids = max_tokens // num_linked + 1  # the last id is only a label
        self.counts = {"cut": 0, "nothing_left": 0, "alike": 0}
        """Documents, or linked documents, that were truncated, left out without a learned token, or left out because
        they are equal then."""

    def fit(self, linked_documents: Sequence[EncodedDocument]) -> list[EncodedDocument]:
        """Documents that belong together, truncated; none if they are left out."""
        self.counts["cut"] += any(len(document.ids) > self._max_ids for document in linked_documents)
        fitting_documents = [document.cut(self._max_ids) for document in linked_documents]
        if len(fitting_documents) > 1 and np.array_equal(fitting_documents[0].ids, fitting_documents[1].ids):
            self.counts["alike"] += 1
            return []
        if not all(document.num_learned for document in fitting_documents):
            self.counts["nothing_left"] += 1
            return []
        return fitting_documents
