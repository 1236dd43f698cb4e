"""Qwen3-MoE (arXiv 2505.09388)."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, DENSE, FUSED, STACK, experts, router
from moe.interchange.family import Family
from moe.interchange.fields import Heads, Key, SparseSteps, Switch, always
from moe.interchange.layer_types import Windows
from moe.interchange.rope import Rope

QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 32_768, "attention_bias": False, "use_sliding_window": False,
        "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        "num_experts": 128, "norm_topk_prob": False,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(),
        Windows(selection="all", has_switch=True),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        SparseSteps(),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(attention__query_key_norm="head", moe__router="softmax_topk", moe__activation="swiglu"),
        *AUXILIARY,
    ),
    only={"qkv_bias": (False,), "shared_expert_intermediate_size": (0,), "use_qk_norm": (True,)},
    unused_keys={"max_window_layers": "all layers have a window, or none"},
    aliases={"num_local_experts": "num_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    fused_tensors=FUSED,
)  # fmt: skip
