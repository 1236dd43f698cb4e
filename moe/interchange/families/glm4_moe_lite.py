"""GLM-4.7-Flash: DeepSeek-V3 with another key for layers without experts."""

from dataclasses import replace

from moe.interchange.families.deepseek_v3 import DEEPSEEK_V3, FIELDS
from moe.interchange.fields import DenseLayers

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_types=("glm4_moe_lite",),
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **DEEPSEEK_V3.defaults, "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240,
        "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20, "n_routed_experts": 64,
        "routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 4, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
    },
    fields=(*FIELDS, DenseLayers(fixed_first=1)),
    unused_keys={key: reason for key, reason in DEEPSEEK_V3.unused_keys.items() if key != "head_dim"},
    aliases={**DEEPSEEK_V3.aliases, "head_dim": "qk_rope_head_dim"},
)  # fmt: skip
