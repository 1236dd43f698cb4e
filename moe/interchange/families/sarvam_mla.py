"""Sarvam-105B: DeepSeek-V3 with other names of some keys."""

from dataclasses import replace

from moe.interchange.families.deepseek_v3 import DEEPSEEK_V3
from moe.interchange.rope import Rope

SARVAM_MLA = replace(
    DEEPSEEK_V3,
    model_types=("sarvam_mla",),
    architecture="SarvamMLAForCausalLM",
    defaults={
        **DEEPSEEK_V3.defaults, "vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 16_384,
        "num_hidden_layers": 32, "num_attention_heads": 64, "n_routed_experts": 128, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    fields=tuple(
        replace(field, yarn_names=("deepseek_yarn",)) if isinstance(field, Rope) else field
        for field in DEEPSEEK_V3.fields
    ),
    unused_keys={**DEEPSEEK_V3.unused_keys, "q_head_dim": DEEPSEEK_V3.unused_keys["qk_head_dim"]},
    aliases={
        "num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    },
)  # fmt: skip
