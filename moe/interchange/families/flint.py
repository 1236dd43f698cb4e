"""Flint: Qwen3's attention with sinks, rotary positions only in layers with a sliding window, and experts chosen by
sigmoid scores beside a shared one."""

from moe.interchange.families.decoder import ATTENTION, DECODER, DENSE, FUSED, STACK, experts, router, shared_experts
from moe.interchange.family import Family, TensorRow, in_layers
from moe.interchange.fields import Heads, Key, SparseSteps, Switch, WriteOnlyKey, always
from moe.interchange.layer_types import Windows
from moe.interchange.local_attention import RotaryWindows
from moe.interchange.rope import Rope

_ATTENTION = (
    Heads(head_dim=128),
    Switch("attention_bias", ("attention.bias", "attention.output_bias")),
    always(attention__query_key_norm="head", attention__sinks=True),
)

FLINT = Family(
    model_types=("flint",),
    architecture="FlintForCausalLM",
    defaults={
        "vocab_size": 150_144, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 49,
        "num_attention_heads": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "max_position_embeddings": 262_144, "attention_bias": False, "sliding_window": 513, "decoder_sparse_step": 1,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "num_experts_per_tok": 6,
        "num_experts": 256, "norm_topk_prob": True,
    },
    fields=(
        *DECODER,
        *_ATTENTION,
        RotaryWindows(
            Windows(selection="types", default="after_second", unused_window=513), Rope(), _ATTENTION
        ),
        SparseSteps(default_dense=(0, 1)),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("shared_expert_intermediate_size", "moe.shared_hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(moe__router="sigmoid_topk", moe__bias_update_rate=0.0, moe__activation="swiglu",
               moe__aux_coefficient=0.0),
        WriteOnlyKey("router_aux_loss_coef", "moe.aux_coefficient"),
    ),
    only={"use_qk_norm": (True,)},
    aliases={"num_local_experts": "num_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *in_layers(TensorRow("attention.sinks", "self_attn.softmax_offset")),
        *DENSE,
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_expert"),
    ),
    fused_tensors=(*in_layers(TensorRow("attention.sinks", "self_attn.sinks")), *FUSED),
)  # fmt: skip
