"""Scores and answers of a folder's model, compared with lm-evaluation-harness's own model class on the same folder."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import processors

from moe.evaluation.extra import require_harness

require_harness()

from lm_eval.api.instance import Instance  # noqa: E402

from moe.evaluation.harness import HarnessModel  # noqa: E402
from moe.export.base import load_base  # noqa: E402
from tests.evaluation.models import text  # noqa: E402
from tests.interchange import tiny  # noqa: E402
from tests.unit import chats  # noqa: E402

MAX_TOKENS = 48
BOS, EOS, IM_END = (chats.SPECIAL.index(name) for name in ("<s>", "</s>", "<|im_end|>"))
TOKENIZERS: dict[str, dict[str, Any]] = {
    "qwen": {"bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>"},
    "bos that is never written": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "prepends": [BOS]},
    "two tokens": {"bos_token": "<s>", "eos_token": "</s>", "prepends": [EOS, BOS]},
    "tokens by id": {
        "bos_token": None, "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "added_tokens_decoder": {str(EOS): {"content": "</s>", "special": True, "normalized": False}},
    },
}  # fmt: skip


def folder_with(tokenizer: dict[str, Any], folder: Path) -> Path:
    """A random model with a BOS token in its config, as in Qwen models."""
    tiny.folder_of(tiny.their_model("qwen3_moe", vocab_size=480), folder, dtype=torch.float32)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = {**tiny.config_of(folder), "bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    keys = {key: value for key, value in tokenizer.items() if key != "prepends"}
    library = tokenizers.Tokenizer.from_str(chats.tokenizer_json())
    if ids := tokenizer.get("prepends"):
        names = [chats.SPECIAL[id] for id in ids]
        template = processors.TemplateProcessing(
            single=f"{' '.join(names)} $A",
            pair=f"{' '.join(names)} $A $B:1",
            special_tokens=list(zip(names, ids, strict=True)),
        )
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **keys}))
    return folder


def requests(kind: str, *calls: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(calls)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_begins_with_what_the_tokenizer_puts_there(name: str, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM  # takes seconds, in each process that collects this file

    folder = folder_with(TOKENIZERS[name], tmp_path / "hub")
    model = HarnessModel(load_base(str(folder), MAX_TOKENS, "float32"))
    reference = HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", max_length=MAX_TOKENS, batch_size=1, add_bos_token=None
    )
    random = Random(name)
    pairs = [
        ("", " the"),
        ("  ", "x"),
        ("the ", " y"),
        *(("q " + text(random, 6), " " + text(random, 3)) for _ in range(8)),
    ]
    if not TOKENIZERS[name].get("prepends"):
        pairs.remove(("  ", "x"))  # the harness has no first token there, and fails
    instances = requests("loglikelihood", *pairs)
    for actual, expected in zip(model.loglikelihood(instances), reference.loglikelihood(instances), strict=True):
        assert actual == (pytest.approx(expected[0], rel=1e-4), expected[1])
    instances = requests("loglikelihood_rolling", *((text(random, 40),) for _ in range(4)))
    assert model.loglikelihood_rolling(instances) == pytest.approx(reference.loglikelihood_rolling(instances), rel=1e-4)
    how = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    instances = requests("generate_until", *((text(random, 5), how) for _ in range(16)))
    assert model.generate_until(instances) == reference.generate_until(instances)
