"""DeepSeek-V3 (arXiv 2412.19437), and Kimi K2, which has the same architecture."""

from moe.interchange.families.decoder import (
    DECODER,
    DENSE,
    FULL_LAYERS,
    FUSED,
    LATENT,
    STACK,
    experts,
    router,
    selection_bias,
    shared_experts,
)
from moe.interchange.families.deepseek_v2 import LATENT_KEYS, LATENT_UNUSED
from moe.interchange.family import Family
from moe.interchange.fields import ExpertGroups, FirstDense, Key, SharedExpertCount, always
from moe.interchange.rope import Rope

SIGMOID = always(
    moe__router="sigmoid_topk", moe__selection_bias=True, moe__bias_update_rate=0.0, moe__aux_coefficient=0.0,
    moe__activation="swiglu",
)  # fmt: skip
"""The selection bias is loaded and stays fixed; to update it by the loads, set `moe: {bias_update_rate: 0.001}` next to
`from`."""

MTP_KEYS = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    "multi-token-prediction heads are copied unchanged, not trained",
)

EXPERT_FIELDS = (
    SharedExpertCount(),
    Key("n_routed_experts", "moe.num_experts"),
    Key("num_experts_per_tok", "moe.top_k"),
    Key("moe_intermediate_size", "moe.hidden_dim"),
    ExpertGroups(),
    Key("norm_topk_prob", "moe.renormalize_gates", bool),
    Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
    SIGMOID,
)
EXPERT_TENSORS = (
    *router("mlp.gate.weight"),
    *selection_bias("mlp.gate.e_score_correction_bias"),
    *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *shared_experts("mlp.shared_experts"),
)

FIELDS = (*DECODER, FULL_LAYERS, *LATENT_KEYS, Rope(pairing="key"), *EXPERT_FIELDS)
"""Fields without those of dense layers."""

DEEPSEEK_V3 = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    architecture="DeepseekV3ForCausalLM",
    defaults={
        "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "rope_interleave": True, "attention_bias": False,
    },
    fields=(*FIELDS, FirstDense()),
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    unused_keys=LATENT_UNUSED | MTP_KEYS,
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=(
        *STACK,
        *LATENT,
        *DENSE,
        *EXPERT_TENSORS,
    ),
    fused_tensors=FUSED,
    mtp_pattern="model.layers.{beyond}.",
    new_config_keys={"num_nextn_predict_layers": 0},
    constant_keys={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)  # fmt: skip
