"""Parts of the tables that most families share."""

from moe.interchange.family import TensorRow, in_layers, part, transposed_row
from moe.interchange.fields import Key, WriteOnlyKey, always
from moe.interchange.layer_types import FULL, EveryLayer

DECODER = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "model_dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("rms_norm_eps", "norm_eps", float),
    Key("tie_word_embeddings", "tie_embeddings", bool),
)
"""Keys of every family."""

FULL_LAYERS = EveryLayer("layer_types", FULL)
"""Layer types of families without windows or linear attention."""

AUXILIARY = (WriteOnlyKey("router_aux_loss_coef", "moe.aux_coefficient"), always(moe__aux_coefficient=0.0))
"""transformers computes this loss only with `output_router_logits`, over all layers together, which is not implemented
here. To use our per-layer loss, set `moe: {aux_coefficient: 0.01}` next to `from`."""

ENDS: tuple[TensorRow, ...] = (
    TensorRow("embedding.weight", "model.embed_tokens.weight"),
    TensorRow("norm.weight", "model.norm.weight"),
    TensorRow("output.weight", "lm_head.weight"),
)
"""Embedding, last norm, logits."""

STACK: tuple[TensorRow, ...] = (
    *ENDS,
    *in_layers(
        TensorRow("norm.weight", "input_layernorm.weight"),
        TensorRow("feed_forward.norm.weight", "post_attention_layernorm.weight"),
    ),
)
"""Embedding, norms before attention and feed-forward layers, logits."""

SANDWICH_STACK: tuple[TensorRow, ...] = (
    *ENDS,
    *in_layers(
        TensorRow("norm.weight", "input_layernorm.weight"),
        TensorRow("post_norm.weight", "post_attention_layernorm.weight"),
        TensorRow("feed_forward.norm.weight", "pre_feedforward_layernorm.weight"),
        TensorRow("feed_forward.post_norm.weight", "post_feedforward_layernorm.weight"),
    ),
)
"""Embedding, norms around attention and feed-forward layers, logits."""

ATTENTION: tuple[TensorRow, ...] = in_layers(
    *(
        TensorRow(f"attention.{parameter_name}.{kind}", f"self_attn.{tensor_name}_proj.{kind}")
        for parameter_name, tensor_name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
        for kind in ("weight", "bias")
    ),
    TensorRow("attention.query_norm.weight", "self_attn.q_norm.weight"),
    TensorRow("attention.key_norm.weight", "self_attn.k_norm.weight"),
)
"""Grouped-query attention; the rows of biases and norms are unused in models without them."""

PACKED_ATTENTION: tuple[TensorRow, ...] = in_layers(
    *(
        part(f"attention.{parameter_name}.{kind}", axes, f"attention.query_key_value.{kind}", f"(r)@{row}/{rest}")
        for parameter_name, row in (("query", "0"), ("key", "$key_row"), ("value", "$value_row"))
        for kind, axes, rest in (("weight", "r m", "$packed_rows m"), ("bias", "r", "$packed_rows"))
    ),
    TensorRow("attention.output.weight", "attention.dense.weight"),
    TensorRow("attention.query_norm.weight", "attention.query_layernorm.weight"),
    TensorRow("attention.key_norm.weight", "attention.key_layernorm.weight"),
)
"""Grouped-query attention with queries, keys and values in one tensor (Ling, Sarvam)."""

DENSE: tuple[TensorRow, ...] = in_layers(
    *(
        TensorRow(f"feed_forward.dense.{parameter_name}.weight", f"mlp.{tensor_name}_proj.weight")
        for parameter_name, tensor_name in (("w_gate", "gate"), ("w_in", "up"), ("w_out", "down"))
    )
)
"""Layers without experts."""


def experts(module: str, gate: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """Rows of experts with a tensor `[out, in]` each."""
    return in_layers(
        *(
            TensorRow(
                f"feed_forward.moe.experts.{parameter_name}",
                f"{module}.experts.{{e}}.{tensor_name}.weight",
                axes,
                turned_axes,
            )
            for parameter_name, tensor_name, axes, turned_axes in (
                ("w_gate", gate, "e m h", "h m"),
                ("w_in", up, "e m h", "h m"),
                ("w_out", down, "e h m", "m h"),
            )
        )
    )


def fused_experts(gate_up: str, down: str) -> tuple[TensorRow, ...]:
    """Rows of experts in one tensor, in which gate rows come before up rows."""
    return in_layers(
        TensorRow("feed_forward.moe.experts.w_gate", gate_up, "e m h", "e (0/2 h) m"),
        TensorRow("feed_forward.moe.experts.w_in", gate_up, "e m h", "e (1/2 h) m"),
        TensorRow("feed_forward.moe.experts.w_out", down, "e h m", "e m h"),
    )


def router(tensor_name: str) -> tuple[TensorRow, ...]:
    return in_layers(transposed_row("feed_forward.moe.router", tensor_name))


def selection_bias(tensor_name: str) -> tuple[TensorRow, ...]:
    return in_layers(TensorRow("feed_forward.moe.router_bias", tensor_name))


def shared_experts(module: str, gate: str | None = None) -> tuple[TensorRow, ...]:
    """Shared experts, and the gate that weighs them."""
    rows = [
        transposed_row(f"feed_forward.moe.shared.{parameter_name}", f"{module}.{tensor_name}_proj.weight")
        for parameter_name, tensor_name in (("w_gate", "gate"), ("w_in", "up"), ("w_out", "down"))
    ]
    return in_layers(*rows, *([transposed_row("feed_forward.moe.shared.gate", gate)] if gate else []))


FUSED = fused_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Experts as transformers stores them in memory, and writes them without `save_original_format`."""

LATENT: tuple[TensorRow, ...] = in_layers(
    TensorRow("attention.query.weight", "self_attn.q_proj.weight"),
    *(
        TensorRow(f"attention.{parameter_name}.{kind}", f"self_attn.{tensor_name}.{kind}")
        for parameter_name, tensor_name in (
            ("query_down", "q_a_proj"),
            ("key_value_down", "kv_a_proj_with_mqa"),
            ("output", "o_proj"),
        )
        for kind in ("weight", "bias")
    ),
    TensorRow("attention.query_norm.weight", "self_attn.q_a_layernorm.weight"),
    TensorRow("attention.query_up.weight", "self_attn.q_b_proj.weight"),
    TensorRow("attention.key_value_norm.weight", "self_attn.kv_a_layernorm.weight"),
    TensorRow("attention.key_value_up.weight", "self_attn.kv_b_proj.weight"),
)
"""Multi-head latent attention (DeepSeek)."""

INDEXER: tuple[TensorRow, ...] = in_layers(
    *(
        TensorRow(f"attention.indexer.{parameter_name}", f"self_attn.indexer.{tensor_name}")
        for parameter_name, tensor_name in (
            ("query.weight", "wq_b.weight"),
            ("key.weight", "wk.weight"),
            ("key_norm.weight", "k_norm.weight"),
            ("key_norm.bias", "k_norm.bias"),
            ("head_weights.weight", "weights_proj.weight"),
        )
    )
)
"""Lightning indexer (DeepSeek-V3.2)."""


def mamba2(module: str) -> tuple[TensorRow, ...]:
    """Mamba-2. Our rows are ordered by group; theirs are all gates, then all inputs, all of B, all of C, and all time
    steps."""
    rows = [
        part(f"linear_attention.projection.{kind}", f"(group {name}_rows@${name}_begin/$width){columns}",
             f"{module}.in_proj.{kind}", f"(group {name}_rows)@$all_{name}/$all_rows{columns}")
        for kind, columns in (("weight", " m"), ("bias", "")) for name in "zxbct"
    ]  # fmt: skip
    rows += [
        part(f"linear_attention.convolution.{kind}", f"(group {name}_rows@$conv_{name}_begin/$channels){columns}",
             f"{module}.conv1d.{kind}", f"(group {name}_rows)@$conv_all_{name}/$all_channels{tensor_columns}")
        for kind, columns, tensor_columns in (("weight", " w", " 1 w"), ("bias", "", "")) for name in "xbc"
    ]  # fmt: skip
    names = {
        "decay": "A_log", "time_step": "dt_bias", "skip": "D", "group_norm.weight": "norm.weight",
        "out_projection.weight": "out_proj.weight", "out_projection.bias": "out_proj.bias",
    }  # fmt: skip
    return in_layers(*rows, *(
        TensorRow(f"linear_attention.{name}", f"{module}.{tensor_name}") for name, tensor_name in names.items()
    ))  # fmt: skip
