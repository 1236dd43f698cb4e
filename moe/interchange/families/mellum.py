"""Mellum 2: Qwen3-MoE with sliding windows whose layers have a RoPE base of their own."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, DENSE, FUSED, STACK, experts, router
from moe.interchange.families.deepseek_v3 import MTP_KEYS
from moe.interchange.family import Family
from moe.interchange.fields import DenseLayers, Heads, Key, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.local_attention import LocalAttention
from moe.interchange.rope import Rope

_ATTENTION = (
    Heads(head_dim=128),
    Switch("attention_bias", ("attention.bias", "attention.output_bias")),
    always(attention__query_key_norm="head"),
)

MELLUM = Family(
    model_types=("mellum",),
    architecture="MellumForCausalLM",
    defaults={
        "vocab_size": 98_304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "sliding_window": 1024, "moe_intermediate_size": 896,
        "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": True, "first_k_dense_replace": 0,
    },
    fields=(
        *DECODER,
        *_ATTENTION,
        LocalAttention(
            windows=Windows(selection="types", default="none", unused_window=1024),
            fields=_ATTENTION,
            rope=Rope(base=5e5),
            local_rope=Rope(base=1e4),
            local_base_key=None,
            has_scaling_key=False,
        ),
        DenseLayers(fixed_first=0),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(moe__router="softmax_topk", moe__activation="swiglu"),
        *AUXILIARY,
    ),
    only={"rope_scaling": (), "use_qk_norm": (True,)},
    unused_keys={
        **MTP_KEYS,
        **dict.fromkeys(("mtp_layer_types", "mtp_mlp_layer_types"), MTP_KEYS["num_mtp_layers"]),
    },
    aliases={"num_local_experts": "num_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    fused_tensors=FUSED,
    mtp_pattern="mtp.",
)  # fmt: skip
