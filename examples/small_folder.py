"""Make a small folder of a model family in the Hugging Face format, with random weights, a tokenizer of Python source
and the published chat template of Qwen3, which the package `trl` ships.

    python -m examples.small_folder FAMILY FOLDER

It stands for a trained base model: transformers loads it, and so does `model: {from: FOLDER}`. Like published base
models, it names the end of a document as the end of a text, and not the end of an answer.
"""

import argparse
import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe.data.sequences.corpora import build
from moe.data.sequences.prepared import train_tokenizer
from moe.data.tokenizer import SPECIALS
from moe.interchange import save_hf
from moe.interchange.expand import expand_model
from moe.spec import LanguageModelSpec, PackagesSpec, model_spec
from moe.tasks.build import build_model

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens 0 to 2, as Qwen3's tokenizer names its own."""
THOUGHT_TOKENS = {3: "<think>", VOCAB_SIZE - 1: "</think>"}
TEXT_END = 0
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "pad_token_id": TEXT_END, "bos_token_id": None, "eos_token_id": TEXT_END,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
           "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 128}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32,
                  "norm_topk_prob": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 128},
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32,
                   "shared_expert_intermediate_size": 128, "num_hidden_layers": 4, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "llama": {},
}  # fmt: skip


def make(family: str, folder: Path) -> LanguageModelSpec:
    """Write a folder and return its model."""
    with TemporaryDirectory() as place:
        config = {"model_type": family, **_COMMON, **FAMILIES[family]}
        (Path(place) / "config.json").write_text(json.dumps(config))
        spec = model_spec(expand_model({"from": place}, None))
        assert isinstance(spec, LanguageModelSpec)
        save_hf(build_model(spec, seed=0), folder, spec=spec, files=_files(json.loads(_tokenizer_json())))
    ends = {name: config[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, **ends}, indent=2) + "\n")
    return spec


@cache
def _tokenizer_json() -> str:
    """The tokenizer that preparation learns from the corpus `packages`."""
    return train_tokenizer(build(PackagesSpec(corpus="packages")).documents(), VOCAB_SIZE - 1).to_json()


def _files(tokenizer: dict[str, Any]) -> dict[str, bytes]:
    """Files of a tokenizer with Qwen3's special tokens and chat template."""
    vocabulary = tokenizer["model"]["vocab"]
    names = {**dict(enumerate(SPECIAL_TOKENS)), **THOUGHT_TOKENS}
    for id, learned_name in enumerate(SPECIALS):
        del vocabulary[learned_name]
        vocabulary[names[id]] = id
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        {"id": id, "content": name, **flags, "special": name in SPECIAL_TOKENS} for id, name in sorted(names.items())
    ]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0], "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
        "chat_template.jinja": _published_template().encode(),
    }


def _published_template() -> str:
    try:
        return Path(str(distribution("trl").locate_file("trl/chat_templates/qwen3.jinja"))).read_text()
    except (PackageNotFoundError, OSError):
        raise SystemExit("the package trl has Qwen3's chat template; install it: pip install trl") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} is there already; name a new folder")
    spec = make(arguments.family, arguments.folder)
    print(f"{arguments.folder}: {arguments.family}, {spec.num_parameters():,} weights")


if __name__ == "__main__":
    main()
