"""Small corpora of documents, and jobs on them, that the tests of moe.data.sequences share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe.data.sequences import SequenceStore
from moe.data.sequences.store import StoreWriter
from moe.data.tokenizer import BOS, EOS
from moe.spec import JobSpec

VOCAB_SIZE = 300


def job(data: dict[str, Any], **train: Any) -> JobSpec:
    """A job of a dense language model with a small vocabulary."""
    model = {
        "kind": "language", "model_dim": 8, "num_layers": 1, "ffn_dim": 8, "vocab_size": VOCAB_SIZE,
        "attention": {"kind": "grouped_query", "num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
    }  # fmt: skip
    if (group_tokens := train.pop("group_tokens", None)) is not None:
        model |= {"moe": {"num_experts": 2, "hidden_dim": 8, "group_tokens": group_tokens}}
    return JobSpec.parse({"model": model, "data": data, "train": {"num_steps": 10, **train}})


def texts(num_documents: int) -> list[str]:
    """Source texts of several lengths, all different."""
    return [
        "".join(f"def f_{index}(x):\n    return {index} * x + {line}\n\n\n" for line in range(1 + index % 7))
        for index in range(num_documents)
    ]


def store_of(folder: Path, sources: dict[str, Sequence[int]], max_tokens: int) -> SequenceStore:
    """A store of documents with so many positions each; every token has its own id, from 4 on."""
    with StoreWriter(folder, list(sources), np.dtype(np.uint32), BOS, EOS, keeps_text=True) as writer:
        first = 4
        for name, lengths in sources.items():
            for length in lengths:
                writer.add(name, np.arange(first, first + length - 1), f"{name} {first}".encode())
                first += length - 1
        writer.finish(max_tokens)
    return SequenceStore(folder)
