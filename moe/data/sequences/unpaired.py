"""Labels of answers, and prompts with completions of other records, for unpaired preference losses (KTO).

TRL combines prompt i with completion i - 1 of a device's batch (`KTOTrainer`). Here that batch is a row, whose
documents then fill the same positions in another order, so that nothing depends on the layout. A row of one document
takes the last completion of the row before it in the global batch, cut at the end of the row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe.data.sequences.store import SequenceRows, SequenceStore
from moe.data.tokenizer import PAD


@dataclass(frozen=True)
class UnpairedPart:
    """Labels of `b` rows, and their mismatched rows if the loss estimates a KL divergence."""

    desirable: NDArray[np.bool_]
    """[b, P], whether each document's answer is desirable; P: most documents of a row."""
    mismatched: SequenceRows | None

    @classmethod
    def from_rows(
        cls, store: SequenceStore, rows: NDArray[np.int64], previous: NDArray[np.int64], *, estimates_kl: bool
    ) -> "UnpairedPart":
        """Part of the rows `rows` [b]; `previous` [b] are the rows before them in the global batch."""
        if not estimates_kl:
            return cls(store.desirable(rows), None)
        return cls(store.desirable(rows), mismatched_rows(store.rows(rows), store.rows(previous)))


def mismatched_rows(rows: SequenceRows, previous: SequenceRows) -> SequenceRows:
    """Rows whose documents are the prompts of `rows`, each with the completion of the document before it; the first
    takes that of the last one, or of the last one of the row in `previous` if it is alone."""
    mismatched = SequenceRows(
        np.full_like(rows.tokens, PAD), np.full_like(rows.documents, -1), np.full_like(rows.labels, -1)
    )
    for row in range(len(rows.tokens)):
        documents = _documents(rows, row)
        if not documents:
            continue
        last = documents[-1] if len(documents) > 1 else _documents(previous, row)[-1]
        start = 0
        for number, (document, other) in enumerate(zip(documents, [last, *documents[:-1]], strict=True)):
            tokens = np.concatenate([document.prompt, other.completion])[: rows.tokens.shape[1]]
            place = slice(start, start + len(tokens))
            mismatched.tokens[row, place] = tokens
            mismatched.documents[row, place] = number
            labels = np.concatenate([np.full(len(document.prompt) - 1, -1), other.labels])
            mismatched.labels[row, place] = labels[: len(tokens)]
            start += len(tokens)
    return mismatched


@dataclass(frozen=True)
class _Document:
    prompt: NDArray[np.int64]
    """Tokens before the first learned one."""
    completion: NDArray[np.int64]
    """Tokens from the first learned one on, without the last, which is only a label."""
    labels: NDArray[np.int64]
    """Labels from the prompt's last token on: one more than `completion`."""


def _documents(rows: SequenceRows, row: int) -> list[_Document]:
    documents = []
    for number in range(int(rows.documents[row].max(initial=-1)) + 1):
        positions = np.flatnonzero(rows.documents[row] == number)
        tokens, labels = rows.tokens[row, positions], rows.labels[row, positions]
        last = int(np.argmax(labels >= 0))
        documents.append(_Document(tokens[: last + 1], tokens[last + 1 :], labels[last:]))
    return documents
