"""A tokenizer learned from a sample of the documents to train on."""

from collections.abc import Iterable
from heapq import heappop, heappush

from moe.data.held_out import hash_text
from moe.data.sequences.corpus import SourceDocument
from moe.data.tokenizer import TextForm, Tokenizer

SAMPLE_CHARS = 10_000_000
"""Characters that merges are learned from. All of the 32 MB of `packages` would take four times as long, and make
tokens of held-out text 1% longer."""
MAX_DOCUMENT_CHARS = 200_000
"""Characters that the sample takes of one document."""


def train_tokenizer(documents: Iterable[SourceDocument], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries; the same for the same documents in any order."""
    return Tokenizer.train(sample(documents), vocab_size, TextForm.DOCUMENTS)


def sample(documents: Iterable[SourceDocument], max_chars: int = SAMPLE_CHARS) -> list[str]:
    """Beginnings of the training documents with the lowest hashes, at most `max_chars` together, and at least one. The
    same for the same documents in any order."""
    heap: list[tuple[int, str]] = []
    """A heap, the highest hash first."""
    num_chars, too_high = 0, 2**64
    for document in documents:
        if document.is_held_out:
            continue
        text = document.text[:MAX_DOCUMENT_CHARS]
        hash = hash_text(text)
        if hash >= too_high:
            continue
        heappush(heap, (-hash, text))
        num_chars += len(text)
        while num_chars > max_chars and len(heap) > 1:
            highest, text = heappop(heap)
            num_chars, too_high = num_chars - len(text), -highest
    return [text for minus_hash, text in sorted(heap, reverse=True) if -minus_hash < too_high]
