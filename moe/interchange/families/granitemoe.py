"""Granite 3 with experts, with or without a shared expert."""

from moe.interchange.families.decoder import ATTENTION, AUXILIARY, DECODER, FULL_LAYERS, STACK, fused_experts, router
from moe.interchange.family import Family, in_layers, part, transposed_row
from moe.interchange.fields import Heads, Key, Optional, Scale, Switch, always
from moe.interchange.rope import Rope

_DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_FIELDS = (
    *DECODER,
    FULL_LAYERS,
    Heads(),
    Rope(),
    Switch("attention_bias", ("attention.bias", "attention.output_bias")),
    Scale("attention_multiplier"),
    Key("embedding_multiplier", "embedding_multiplier", float),
    Key("residual_multiplier", "residual_multiplier", float),
    Key("logits_scaling", "logits_divisor", float),
    Key("num_local_experts", "moe.num_experts"),
    Key("num_experts_per_tok", "moe.top_k"),
    Key("intermediate_size", "moe.hidden_dim"),
    always(moe__router="softmax_topk", moe__softmax="after_topk", moe__activation="swiglu"),
    *AUXILIARY,
)
_TENSORS = (
    *STACK,
    *ATTENTION,
    *router("block_sparse_moe.router.layer.weight"),
    *fused_experts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
_FUSED = (
    *router("block_sparse_moe.router.weight"),
    *fused_experts("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
)

GRANITE_MOE = Family(
    model_types=("granitemoe",),
    architecture="GraniteMoeForCausalLM",
    defaults=_DEFAULTS,
    fields=_FIELDS,
    tensors=_TENSORS,
    fused_tensors=_FUSED,
)

GRANITE_MOE_SHARED = Family(
    model_types=("granitemoeshared",),
    architecture="GraniteMoeSharedForCausalLM",
    defaults={**_DEFAULTS, "shared_intermediate_size": 0},
    fields=(*_FIELDS, Optional("shared_intermediate_size", "moe.shared_hidden_dim", int, null_value=0)),
    tensors=(
        *_TENSORS,
        *in_layers(
            part("feed_forward.moe.shared.w_gate", "m h", "shared_mlp.input_linear.weight", "(0/2 h) m"),
            part("feed_forward.moe.shared.w_in", "m h", "shared_mlp.input_linear.weight", "(1/2 h) m"),
            transposed_row("feed_forward.moe.shared.w_out", "shared_mlp.output_linear.weight"),
        ),
    ),
    fused_tensors=_FUSED,
)
