"""Corpora → tokenizers → token store → deterministic batches. Loads no torch, and a name only what it needs.

`check` looks at a corpus before launch; `prepare` builds or finds everything a run reads; `Sampler` gives the
global batch of any step; `evaluation_batches` goes through a held-out set once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.data.batch import BatchPart, GlobalBatch
    from moe.data.corpora import check
    from moe.data.description import describe
    from moe.data.evaluation import evaluation_batches
    from moe.data.prepared import Prepared, prepare
    from moe.data.sampler import Sampler
    from moe.data.store import TokenStore
    from moe.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Tokenizers

_WHERE = {
    "check": "corpora",
    "prepare": "prepared",
    "Prepared": "prepared",
    "describe": "description",
    "Tokenizers": "tokenizer",
    "Tokenizer": "tokenizer",
    "PAD": "tokenizer",
    "BOS": "tokenizer",
    "EOS": "tokenizer",
    "UNK": "tokenizer",
    "TokenStore": "store",
    "Sampler": "sampler",
    "GlobalBatch": "batch",
    "BatchPart": "batch",
    "evaluation_batches": "evaluation",
}

__all__ = [
    "check", "prepare", "Prepared", "describe", "Tokenizers", "Tokenizer", "PAD", "BOS", "EOS", "UNK",
    "TokenStore", "Sampler", "GlobalBatch", "BatchPart", "evaluation_batches",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'moe.data' has no attribute {name!r}")
    value = getattr(import_module(f"moe.data.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
