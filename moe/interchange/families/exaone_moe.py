"""K-EXAONE: experts as in DeepSeek-V3, and rotary positions only in layers with a sliding window."""

from moe.interchange.families.decoder import (
    ATTENTION,
    DECODER,
    DENSE,
    FUSED,
    STACK,
    experts,
    router,
    selection_bias,
    shared_experts,
)
from moe.interchange.families.deepseek_v3 import MTP_KEYS, SIGMOID
from moe.interchange.family import Family
from moe.interchange.fields import DenseLayers, ExpertGroups, Heads, Key, SharedExpertCount, always
from moe.interchange.layer_types import Windows
from moe.interchange.local_attention import RotaryWindows
from moe.interchange.rope import Rope

_ATTENTION = (Heads(), always(attention__query_key_norm="head"))


EXAONE_MOE = Family(
    model_types=("exaone_moe",),
    architecture="ExaoneMoEForCausalLM",
    defaults={
        "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    },
    fields=(
        *DECODER,
        *_ATTENTION,
        RotaryWindows(Windows(selection="types", default="pattern", unused_window=4096), Rope(), _ATTENTION),
        DenseLayers(ignores_first=True),
        SharedExpertCount("num_shared_experts"),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        ExpertGroups(),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
        SIGMOID,
    ),
    only={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    unused_keys=MTP_KEYS,
    aliases={"num_local_experts": "num_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.gate.weight"),
        *selection_bias("mlp.e_score_correction_bias"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_experts"),
    ),
    fused_tensors=(*selection_bias("mlp.gate.e_score_correction_bias"), *FUSED),
    mtp_pattern="mtp.",
)  # fmt: skip
