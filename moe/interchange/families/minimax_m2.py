"""MiniMax-M2."""

from moe.interchange.families.decoder import (
    ATTENTION,
    AUXILIARY,
    DECODER,
    FULL_LAYERS,
    FUSED,
    STACK,
    experts,
    router,
    selection_bias,
)
from moe.interchange.families.deepseek_v3 import MTP_KEYS, SIGMOID
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, always
from moe.interchange.layer_types import EveryLayer
from moe.interchange.rope import Rope

MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_experts_per_tok": 8, "num_local_experts": 256,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        EveryLayer("attn_type_list", 1),
        Heads(head_dim=128),
        Rope(base=5e6, fraction=1.0, dim_key="rotary_dim"),
        Key("num_local_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("intermediate_size", "moe.hidden_dim"),
        always(attention__query_key_norm="width", moe__renormalize_gates=True),
        *AUXILIARY,
        SIGMOID,
    ),
    only={
        "router_jitter_noise": (0,), "scoring_func": ("sigmoid",), "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",), "use_routing_bias": (True,), "shared_intermediate_size": (0,),
        "sliding_window": (), "layernorm_full_attention_beta": (1,), "layernorm_mlp_beta": (1,),
    },
    unused_keys={
        **dict.fromkeys(("use_mtp", "num_mtp_modules", "mtp_transformer_layers"), MTP_KEYS["num_mtp_layers"]),
        "shared_moe_mode": "there are no shared experts",
        "mlp_intermediate_size": "there are no dense layers",
        "layernorm_linear_attention_beta": "there is no linear attention",
    },
    aliases={"num_experts": "num_local_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *router("block_sparse_moe.gate.weight"),
        *selection_bias("block_sparse_moe.e_score_correction_bias"),
        *experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    fused_tensors=(*router("mlp.gate.weight"), *selection_bias("mlp.e_score_correction_bias"), *FUSED),
    mtp_pattern="model.layers.{beyond}.",
    constant_keys={
        "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
)  # fmt: skip
