"""Small language models of every kind of attention, with any router, which are compared under each layout."""

from typing import Any

from moe.spec import AdapterSpec, LanguageModelSpec, MoESpec

VOCABULARY = 300
_HEADS = {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}

ATTENTIONS: dict[str, dict[str, Any]] = {
    "GQA with windows, sinks and biases": {
        "attention": {**_HEADS, "window": 3, "sinks": True, "bias": True, "output_bias": True, "query_key_norm": "head",
                      "norm_after_rope": True},
    },
    "GQA with norms as wide as all heads": {
        "attention": {**_HEADS, "query_key_norm": "width", "clip": 1.5},
        "tie_embeddings": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_divisor": 2.0,
    },
    "MLA": {
        "attention": {"kind": "latent", "num_heads": 2, "query_rank": 6, "key_value_rank": 8, "head_dim": 4,
                      "rope_dim": 4, "value_dim": 6, "bias": True, "query_scaling": {"coefficient": 0.5, "tokens": 3}},
        "first_dense_layers": 1,
    },
    "MLA with an indexer": {
        "attention": {"kind": "latent", "num_heads": 4, "query_rank": 6, "key_value_rank": 8, "head_dim": 4,
                      "rope_dim": 2, "value_dim": 4,
                      "indexer": {"num_heads": 3, "head_dim": 5, "top_k": 3, "loss_coefficient": 0.5}},
    },
    "DeltaNet and gated GQA": {
        "attention": {"kind": "grouped_query", "num_heads": 2, "num_kv_heads": 2, "head_dim": 8,
                      "query_key_norm": "head", "output_gate": True, "rope": {"fraction": 0.5}},
        "linear_attention": {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 4, "value_dim": 6},
        "full_attention_every": 2, "norm_one_plus": True,
    },
    "global and local GQA with norms around them": {
        "attention": {**_HEADS, "head_dim": 8, "query_key_norm": "head", "rope": {"base": 1e6}},
        "local_attention": {**_HEADS, "num_kv_heads": 4, "window": 3, "sinks": True, "value_dim": 6,
                            "value_multiplier": 0.7},
        "norm_placement": "sandwich", "norm_one_plus": True,
    },
    "GQA in chunks, and without positions": {
        "attention": {**_HEADS, "rope": {"fraction": 0.0},
                      "query_scaling": {"coefficient": 0.5, "tokens": 3, "first_position": 1}},
        "local_attention": {**_HEADS, "query_key_norm": "unscaled", "norm_after_rope": True, "window": 3,
                            "window_kind": "chunk", "windowed_layers": [0], "rope": {"pairing": "interleaved"}},
        "moe": {"apply_gates_to": "inputs", "shared_hidden_dim": 8},
    },
    "GQA with norms after it": {"attention": {**_HEADS, "query_key_norm": "width"}, "norm_placement": "post"},
    "GQA with layer norms, biases and LongRoPE": {
        "attention": {**_HEADS, "bias": True, "output_bias": True, "rope": {"scaling": {
            "kind": "longrope", "original_tokens": 4, "short_factors": [1.0, 1.5], "long_factors": [2.0, 9.0],
            "short_mscale": 1.2, "long_mscale": 1.4}}},
        "norm_kind": "layer", "output_bias": True,
    },
    "short convolutions and GQA": {
        "attention": {**_HEADS, "query_key_norm": "head"},
        "linear_attention": {"kind": "short_convolution", "bias": True}, "attention_layers": [1],
    },
    "Mamba-2 and GQA without positions": {
        "attention": {**_HEADS, "rope": {"fraction": 0.0}},
        "linear_attention": {"kind": "mamba2", "num_heads": 4, "head_dim": 4, "state_dim": 3, "num_groups": 2},
        "attention_layers": [1],
    },
    "layers of one part with latent experts": {
        "num_layers": 4, "feed_forward_layers": [0, 2], "attention": {**_HEADS, "rope": {"fraction": 0.0}},
        "linear_attention": {"kind": "mamba2", "num_heads": 2, "head_dim": 6, "state_dim": 4, "num_groups": 2,
                             "min_time_step": 0.1},
        "attention_layers": [1], "moe": {"latent_dim": 10, "activation": "relu2", "shared_hidden_dim": 5},
    },
    "GQA with keys as values, and branches of experts with norms": {
        "attention": {**_HEADS, "head_dim": 8, "query_key_norm": "head", "keys_as_values": True, "value_norm": True,
                      "bias": True, "scale": 1.0, "rope": {"fraction": 0.5, "proportional": True}},
        "local_attention": {**_HEADS, "num_kv_heads": 4, "query_key_norm": "head", "value_norm": True, "window": 3},
        "norm_placement": "sandwich", "logits_cap": 2.0, "layer_scalar": True, "tie_embeddings": True,
        "moe": {"router_norm": True, "expert_scale": True, "branch_norms": True, "shared_hidden_dim": 5},
    },
}  # fmt: skip
"""As in families: GPT-OSS with the norms of Hunyuan, OLMoE with the multipliers of Granite, Mistral 4, Qwen3-Next,
Gemma with the heads of MiMo-V2, Llama 4, OLMo 2, Phi-3.5-MoE, LFM2, Granite 4, Nemotron 3,
Gemma 4."""


def language_model(attention: str, **moe: object) -> LanguageModelSpec:
    """A model of four experts whose groups depend on the batch. `moe` is that of `combinations.model_of`."""
    gshard = {"capacity_factor": 1.0, "min_capacity": 1, "aux_coefficient": 0.05}
    parts = {"num_layers": 2, **ATTENTIONS[attention]}
    fields = {"num_experts": 4, "group_tokens": 64, **parts.pop("moe", {}), **(gshard if "router" not in moe else {})}
    experts = MoESpec(model_dim=16, hidden_dim=24, **{**fields, **moe})
    return LanguageModelSpec(kind="language", model_dim=16, ffn_dim=32, vocab_size=VOCABULARY, moe=experts, **parts)


def dense(spec: LanguageModelSpec) -> LanguageModelSpec:
    """The same model without experts."""
    return spec.model_copy(update={"moe": None, "first_dense_layers": 0})


def with_frozen_indexer(spec: LanguageModelSpec) -> LanguageModelSpec:
    """The same model, whose indexer, if it has one, is not trained."""
    fields = spec.model_dump()
    if fields["attention"].get("indexer") is not None:
        fields["attention"]["indexer"] |= {"loss_coefficient": 0.0, "stage": "sparse"}
    return LanguageModelSpec(**fields)


def with_adapter(spec: LanguageModelSpec, adapter: AdapterSpec | dict[str, Any]) -> LanguageModelSpec:
    """The same model with an adapter, which an indexer cannot learn beside."""
    return LanguageModelSpec(**{**with_frozen_indexer(spec).model_dump(), "adapter": adapter})
