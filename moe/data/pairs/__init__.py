"""Pairs for translation: corpora → tokenizers → token store → deterministic batches. Loads no torch; each name loads
only what it needs.

`check` looks at a corpus before launch; `prepare` builds or finds everything a run reads; `Sampler` gives the global
batch of any step; `evaluation_batches` iterates over a held-out set once.
"""

from typing import TYPE_CHECKING

from moe.lazy import lazy_names

if TYPE_CHECKING:
    from moe.data.pairs.batch import GlobalPairBatch, PairBatchPart
    from moe.data.pairs.corpora import check
    from moe.data.pairs.description import describe
    from moe.data.pairs.evaluation import evaluation_batches
    from moe.data.pairs.prepared import PreparedPairs, prepare
    from moe.data.pairs.sampler import Sampler
    from moe.data.pairs.store import TokenStore
    from moe.data.pairs.tokenizers import Tokenizers

_WHERE = {
    "check": ".corpora",
    "prepare": ".prepared",
    "PreparedPairs": ".prepared",
    "describe": ".description",
    "Tokenizers": ".tokenizers",
    "TokenStore": ".store",
    "Sampler": ".sampler",
    "GlobalPairBatch": ".batch",
    "PairBatchPart": ".batch",
    "evaluation_batches": ".evaluation",
}

__all__ = [
    "check", "prepare", "PreparedPairs", "describe", "Tokenizers", "TokenStore", "Sampler", "GlobalPairBatch",
    "PairBatchPart", "evaluation_batches",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__, _WHERE)
