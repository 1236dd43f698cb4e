"""LFM2 with experts (arXiv 2511.23404): gated short convolutions, and grouped-query attention in some layers."""

from moe.interchange.families.decoder import experts, fused_experts, router, selection_bias
from moe.interchange.family import Family, TensorRow, in_layers, part
from moe.interchange.fields import FirstDense, Heads, Key, SelectionBias, always
from moe.interchange.layer_types import AttentionLayers
from moe.interchange.rope import Rope

_NORMS = (
    ("norm", "operator_norm"), ("feed_forward.norm", "ffn_norm"),
    ("attention.query_norm", "self_attn.q_layernorm"), ("attention.key_norm", "self_attn.k_layernorm"),
)  # fmt: skip
_MATRICES = (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out"))

LFM2_MOE = Family(
    model_types=("lfm2_moe",),
    architecture="Lfm2MoeForCausalLM",
    defaults={
        "vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "norm_eps": 1e-5,
        "max_position_embeddings": 128_000, "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3,
        "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_expert_bias": True,
    },
    fields=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "model_dim"),
        Key("num_hidden_layers", "num_layers"),
        Key("norm_eps", "norm_eps", float),
        Key("tie_word_embeddings", "tie_embeddings", bool),
        Heads(),
        Rope(base=1e6),
        AttentionLayers(linear_types=("conv",)),
        Key("conv_L_cache", "linear_attention.conv_tokens"),
        Key("conv_bias", "linear_attention.bias", bool),
        FirstDense("num_dense_layers"),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
        SelectionBias("use_expert_bias"),
        always(
            attention__query_key_norm="head", linear_attention__kind="short_convolution", moe__router="sigmoid_topk",
            moe__renormalize_eps=1e-6, moe__bias_update_rate=0.0, moe__aux_coefficient=0.0, moe__activation="swiglu",
        ),
    ),
    aliases={"tie_embedding": "tie_word_embeddings"},
    tensors=(
        TensorRow("embedding.weight", "model.embed_tokens.weight"),
        TensorRow("norm.weight", "model.embedding_norm.weight"),
        TensorRow("output.weight", "lm_head.weight"),
        *in_layers(
            *(TensorRow(f"{name}.weight", f"{tensor_name}.weight") for name, tensor_name in _NORMS),
            *(
                TensorRow(f"attention.{name}.weight", f"self_attn.{tensor_name}_proj.weight")
                for name, tensor_name in _MATRICES
            ),
            # Our rows are ordered by channel; theirs are all input gates, then all output gates, then all inputs.
            part("linear_attention.projection.weight", "(c parts) m", "conv.in_proj.weight", "(parts c) m"),
            part("linear_attention.projection.bias", "(c parts)", "conv.in_proj.bias", "(parts c)"),
            part("linear_attention.convolution.weight", "c w", "conv.conv.weight", "c 1 w"),
            TensorRow("linear_attention.convolution.bias", "conv.conv.bias"),
            TensorRow("linear_attention.output.weight", "conv.out_proj.weight"),
            TensorRow("linear_attention.output.bias", "conv.out_proj.bias"),
            *(
                TensorRow(f"feed_forward.dense.{name}.weight", f"feed_forward.{tensor_name}.weight")
                for name, tensor_name in (("w_gate", "w1"), ("w_in", "w3"), ("w_out", "w2"))
            ),
        ),
        *router("feed_forward.gate.weight"),
        *selection_bias("feed_forward.expert_bias"),
        *experts("feed_forward", gate="w1", up="w3", down="w2"),
    ),
    fused_tensors=fused_experts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
)  # fmt: skip
