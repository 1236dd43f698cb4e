"""Makes a small folder of one family in the Hugging Face format, with random weights, a tokenizer of Python source and
a chat template.

    python -m examples.small_folder FAMILY FOLDER

It stands for a folder that somebody has trained: transformers loads it, and so does `model: {from: FOLDER}`.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moe.data.sequences import prepare
from moe.data.tokenizer import BOS, EOS, PAD
from moe.interchange import save_hf
from moe.interchange.expand import expand_model
from moe.spec import LanguageModelSpec, PackagesSpec, model_spec
from moe.tasks.build import build_model

VOCAB_SIZE = 4096
CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<' + message.role + '>\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '</>' }}{% endgeneration %}
{%- else %}{{ message.content + '</>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}"""
"""How it writes conversations."""
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
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


def make(family: str, folder: Path, cache: Path | None = None) -> LanguageModelSpec:
    """The model of a new folder. What the tokenizer is learned from is prepared in `cache`, where one is given."""
    with TemporaryDirectory() as place:
        config = {"model_type": family, **_COMMON, **FAMILIES[family]}
        (Path(place) / "config.json").write_text(json.dumps(config))
        spec = model_spec(expand_model({"from": place}, None))
        assert isinstance(spec, LanguageModelSpec)
        data = prepare(
            PackagesSpec(corpus="packages"), VOCAB_SIZE, cache or Path(place) / "cache", report=print
        )
        files = {**data.tokenizer_files(), "chat_template.jinja": CHAT_TEMPLATE.encode()}
        save_hf(build_model(spec, seed=0), folder, spec=spec, files=files)
    return spec


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    if chosen.folder.exists():
        parser.error(f"{chosen.folder} is there already; name a new folder")
    spec = make(chosen.family, chosen.folder)
    print(f"{chosen.folder}: {chosen.family}, {spec.num_parameters():,} weights")


if __name__ == "__main__":
    main()
