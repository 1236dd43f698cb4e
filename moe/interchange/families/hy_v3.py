"""Hy3 (Hunyuan 3): Qwen3's attention, and experts as in DeepSeek-V3, without groups."""

from moe.interchange.families.decoder import (
    ATTENTION,
    DECODER,
    DENSE,
    FULL_LAYERS,
    FUSED,
    STACK,
    experts,
    router,
    selection_bias,
    shared_experts,
)
from moe.interchange.families.deepseek_v3 import MTP_KEYS, SIGMOID
from moe.interchange.family import Family
from moe.interchange.fields import DenseLayers, Heads, Key, SharedExpertCount, Switch, always
from moe.interchange.rope import Rope

_PRECISION = "train.dtype decides the precision of this product"

HY_V3 = Family(
    model_types=("hy_v3",),
    architecture="HYV3ForCausalLM",
    defaults={
        "vocab_size": 120_832, "hidden_size": 4096, "intermediate_size": 13_312, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "num_experts": 192,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826, "first_k_dense_replace": 1,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(head_dim=128),
        Rope(base=11_158_840.0),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        DenseLayers(fixed_first=1),
        SharedExpertCount("num_shared_experts"),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("router_scaling_factor", "moe.routed_scaling_factor", float),
        always(attention__query_key_norm="head", moe__renormalize_gates=True),
        SIGMOID,
    ),
    only={
        "qk_norm": (True,), "route_norm": (True,), "moe_router_use_sigmoid": (True,),
        "moe_router_enable_expert_bias": (True,),
    },
    unused_keys={
        **MTP_KEYS,
        **dict.fromkeys(
            ("enable_moe_fp32_combine", "enable_attention_fp32_softmax", "enable_lm_head_fp32"), _PRECISION
        ),
        "expert_hidden_dim": "moe_intermediate_size says the same",
        "use_grouped_mm": "the plan decides how experts are computed",
    },
    aliases={"num_local_experts": "num_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.router.gate.weight"),
        *selection_bias("mlp.expert_bias"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_mlp"),
    ),
    fused_tensors=(
        *router("mlp.gate.weight"),
        *selection_bias("mlp.e_score_correction_bias"),
        *shared_experts("mlp.shared_experts"),
        *FUSED,
    ),
    mtp_pattern="model.layers.{beyond}.",
    new_config_keys={"num_nextn_predict_layers": 0},
    constant_keys={
        "qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
    },
)  # fmt: skip
