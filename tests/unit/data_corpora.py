"""Small corpora and specs that the tests of moe.data share."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe.data.pairs.pair import Pair
from moe.data.pairs.store import TokenStore
from moe.spec import JobSpec

LANGS = ("de", "fr", "ru", "ja")
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "one", "lazy", "dog")


def job(data: dict[str, Any], **train: Any) -> JobSpec:
    """A job on a corpus with a small vocabulary; `group_tokens` goes to the model's experts."""
    moe = {"num_experts": 2, "hidden_dim": 8, "group_tokens": train.pop("group_tokens", 256)}
    dimensions = {
        "model_dim": 8, "num_heads": 1, "head_dim": 8, "ffn_dim": 8, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "source_vocab_size": 400, "target_vocab_size": 400,
    }  # fmt: skip
    train = {"num_steps": 10, "batch_tokens": 512, **train}
    return JobSpec.parse({"name": "x", "model": {**dimensions, "moe": moe}, "data": data, "train": train})


def sentences(num_messages: int) -> list[dict[str, str]]:
    """Rows of a JSONL corpus: each message in every language of LANGS."""
    signs = {"de": "abcdefg", "fr": "éàçèùôî", "ru": "абвгдеж", "ja": "あいうえおかき"}
    rows = []
    for index in range(num_messages):
        words = [index * 7919 % 97 % (step + 5) for step in range(1 + index % 6)]
        target = " ".join(WORDS[word % 9] for word in words)
        for lang in LANGS:
            source = " ".join(signs[lang][word % 7] * (1 + word % 4) for word in words)
            rows.append({"source": f"{source} {index}", "target": f"{target} number {index}", "lang": lang})
    return rows


def write_jsonl(path: Path, rows: Iterable[Any]) -> str:
    """Write rows, objects or finished lines, and return the path as a spec holds it."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def store_of(folder: Path, lengths: Sequence[tuple[int, int]], langs: Sequence[str]) -> TokenStore:
    """A store of pairs with given lengths (both count EOS); every token identifies its pair and side."""
    pairs = [Pair(lang, f"s{index}", f"t{index}") for index, lang in enumerate(langs)]
    sources = [np.full(source - 1, 4 + 2 * index) for index, (source, _) in enumerate(lengths)]
    targets = [np.full(target - 1, 5 + 2 * index) for index, (_, target) in enumerate(lengths)]
    TokenStore.write(folder, pairs, sources, targets, sorted(set(langs)))
    return TokenStore(folder)
