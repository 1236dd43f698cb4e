"""Sequences for language models: documents → tokenizer → packed rows → deterministic batches. Loads no torch; each name
loads only what it needs.

`check` looks at a corpus before launch; `prepare` builds or finds everything a run reads; `SequenceSampler` gives the
global batch of any step; `unigram_nats_per_source` and `xz_bits_per_byte` measure held-out text without a model.
"""

from typing import TYPE_CHECKING

from moe.lazy import lazy_names

if TYPE_CHECKING:
    from moe.data.sequences.baselines import unigram_nats_per_source, xz_bits_per_byte
    from moe.data.sequences.batch import GlobalSequenceBatch, SequenceBatchPart
    from moe.data.sequences.corpora import check
    from moe.data.sequences.description import describe
    from moe.data.sequences.model_tokenizer import CLOSERS, ENDS, ModelTokenizer, load_tokenizer
    from moe.data.sequences.prepared import PreparedSequences, prepare
    from moe.data.sequences.sampler import SequenceSampler
    from moe.data.sequences.store import SequenceStore

_WHERE = {
    "check": ".corpora",
    "prepare": ".prepared",
    "PreparedSequences": ".prepared",
    "describe": ".description",
    "ModelTokenizer": ".model_tokenizer",
    "load_tokenizer": ".model_tokenizer",
    "CLOSERS": ".model_tokenizer",
    "ENDS": ".model_tokenizer",
    "SequenceStore": ".store",
    "SequenceSampler": ".sampler",
    "GlobalSequenceBatch": ".batch",
    "SequenceBatchPart": ".batch",
    "unigram_nats_per_source": ".baselines",
    "xz_bits_per_byte": ".baselines",
}

__all__ = [
    "check", "prepare", "PreparedSequences", "describe", "CLOSERS", "ENDS", "ModelTokenizer", "load_tokenizer",
    "SequenceStore", "SequenceSampler", "GlobalSequenceBatch", "SequenceBatchPart",
    "unigram_nats_per_source", "xz_bits_per_byte",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__, _WHERE)
