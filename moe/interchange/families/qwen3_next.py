"""Qwen3-Next: Gated DeltaNet in three layers of four, gated attention in the fourth."""

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
from moe.interchange.family import Family, TensorRow, in_layers, part
from moe.interchange.fields import Heads, Key, SparseSteps, Switch, always
from moe.interchange.layer_types import LinearLayers
from moe.interchange.rope import Rope


def by_kind(parameter_name: str, parameter_dim: str, tensor_name: str, tensor_dims: str) -> tuple[TensorRow, ...]:
    """Rows of queries, keys and values: ours are ordered by key head; theirs are all queries, then all keys, then all
    values."""
    places = (("q", "0", "0"), ("k", "$q", "$queries"), ("v", "$qk", "$keys"))
    return tuple(
        part(
            parameter_name,
            f"(j {kind}@{in_head}/$head) {parameter_dim}",
            tensor_name,
            f"(j {kind})@{first}/$rows {tensor_dims}",
        )
        for kind, in_head, first in places
    )


DELTA_NET_KEYS = (
    Key("linear_num_key_heads", "linear_attention.num_key_heads"),
    Key("linear_num_value_heads", "linear_attention.num_value_heads"),
    Key("linear_key_head_dim", "linear_attention.key_dim"),
    Key("linear_value_head_dim", "linear_attention.value_dim"),
    Key("linear_conv_kernel_dim", "linear_attention.conv_tokens"),
)

DELTA_NET: tuple[TensorRow, ...] = in_layers(
    by_kind("linear_attention.convolution.weight", "w", "linear_attn.conv1d.weight", "1 w"),
    TensorRow("linear_attention.decay", "linear_attn.A_log"),
    TensorRow("linear_attention.time_step", "linear_attn.dt_bias"),
    TensorRow("linear_attention.value_norm.weight", "linear_attn.norm.weight"),
    TensorRow("linear_attention.output.weight", "linear_attn.out_proj.weight"),
)
"""Gated DeltaNet, without the projections of its inputs."""

QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    defaults={
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "decoder_sparse_step": 1,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
        "num_experts": 512, "norm_topk_prob": True, "full_attention_interval": 4,
    },
    fields=(
        *DECODER,
        Heads(head_dim=256),
        Rope(fraction=0.25),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        LinearLayers(),
        *DELTA_NET_KEYS,
        SparseSteps(),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("shared_expert_intermediate_size", "moe.shared_hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        always(
            attention__query_key_norm="head", attention__output_gate=True, norm_one_plus=True,
            moe__router="softmax_topk", moe__activation="swiglu", moe__shared_gate=True,
        ),
        *AUXILIARY,
    ),
    only={"use_sliding_window": (False,)},
    tensors=(
        *STACK,
        *ATTENTION,
        *DELTA_NET,
        *in_layers(
            TensorRow("linear_attention.projection.weight", "linear_attn.in_proj_qkvz.weight"),
            TensorRow("linear_attention.decays.weight", "linear_attn.in_proj_ba.weight"),
        ),
        *DENSE,
        *router("mlp.gate.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_expert", gate="mlp.shared_expert_gate.weight"),
    ),
    fused_tensors=FUSED,
    mtp_pattern="mtp.",
)  # fmt: skip
