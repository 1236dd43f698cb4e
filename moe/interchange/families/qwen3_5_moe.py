"""Text models of Qwen3.5 and Qwen3.6: Qwen3-Next with separate projections, and experts in every layer."""

from moe.interchange.families.decoder import (
    ATTENTION,
    AUXILIARY,
    DECODER,
    FUSED,
    STACK,
    experts,
    router,
    shared_experts,
)
from moe.interchange.families.deepseek_v3 import MTP_KEYS
from moe.interchange.families.qwen3_next import DELTA_NET, DELTA_NET_KEYS, by_kind
from moe.interchange.family import Family, TensorRow, in_layers
from moe.interchange.fields import Heads, Key, Switch, always
from moe.interchange.layer_types import LinearLayers
from moe.interchange.rope import Rope

QWEN3_5_MOE_TEXT = Family(
    model_types=("qwen3_5_moe_text",),
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8, "num_experts": 256, "full_attention_interval": 4,
    },
    fields=(
        *DECODER,
        Heads(head_dim=256),
        Rope(fraction=0.25, has_picture_positions=True),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        LinearLayers(),
        *DELTA_NET_KEYS,
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("shared_expert_intermediate_size", "moe.shared_hidden_dim"),
        always(
            attention__query_key_norm="head", attention__output_gate=True, norm_one_plus=True,
            linear_attention__split_projections=True, moe__router="softmax_topk", moe__activation="swiglu",
            moe__renormalize_gates=True, moe__shared_gate=True,
        ),
        *AUXILIARY,
    ),
    only={
        "use_sliding_window": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([],),
        "norm_topk_prob": (True,), "attn_output_gate": (True,), "output_gate_type": ("swish", "silu"),
    },
    unused_keys={
        **MTP_KEYS,
        "intermediate_size": "no layer is without experts",
        "mamba_ssm_dtype": "states of linear attention are at least float32 here",
    },
    tensors=(
        *STACK,
        *ATTENTION,
        *DELTA_NET,
        *in_layers(
            by_kind("linear_attention.projection.weight", "m", "linear_attn.in_proj_qkv.weight", "m"),
            TensorRow("linear_attention.gate.weight", "linear_attn.in_proj_z.weight"),
            TensorRow("linear_attention.strength.weight", "linear_attn.in_proj_b.weight"),
            TensorRow("linear_attention.step.weight", "linear_attn.in_proj_a.weight"),
        ),
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate.weight"),
    ),
    fused_tensors=FUSED,
    mtp_pattern="mtp.",
)  # fmt: skip
