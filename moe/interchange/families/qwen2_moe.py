"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671)."""

from moe.interchange.families.decoder import (
    ATTENTION,
    AUXILIARY,
    DECODER,
    DENSE,
    FUSED,
    STACK,
    experts,
    router,
    shared_experts,
)
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, SparseSteps, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    architecture="Qwen2MoeForCausalLM",
    defaults={
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 32_768, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
        "norm_topk_prob": False, "qkv_bias": True,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(),
        Windows(selection="types", default="below", has_switch=True),
        Switch("qkv_bias", ("attention.bias",)),
        SparseSteps(),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("shared_expert_intermediate_size", "moe.shared_hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(moe__router="softmax_topk", moe__activation="swiglu", moe__shared_gate=True),
        *AUXILIARY,
    ),
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate.weight"),
    ),
    fused_tensors=FUSED,
)  # fmt: skip
