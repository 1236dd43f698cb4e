"""Features of published language models that are not implemented here, by the config keys that show them. No torch.

A config of an unknown family is refused with these. A feature that becomes supported is deleted from `FEATURES`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.reading import json_equal

TEXT_CONFIG = "text_config"
"""Key with the config of the language part, in models that also have other parts."""


def is_on(value: Any) -> bool:
    """Whether a value is other than null, false, zero and empty."""
    return bool(value)


def varies(value: Any) -> bool:
    """Whether a list has different entries."""
    return isinstance(value, list) and any(entry != value[0] for entry in value)


def has(*words: Any) -> Callable[[Any], bool]:
    """Whether a value, or an entry of a list, is one of these."""

    def is_shown(value: Any) -> bool:
        entries = value if isinstance(value, list) else [value]
        return any(json_equal(entry, word) for entry in entries for word in words)

    return is_shown


def has_all(*words: Any) -> Callable[[Any], bool]:
    """Whether a list has all of these entries."""
    return lambda value: isinstance(value, list) and all(word in value for word in words)


@dataclass(frozen=True)
class Feature:
    """Feature that is not implemented here."""

    name: str
    keys: Mapping[str, Callable[[Any], bool]]
    """Config keys that show it, each with the test of its value. `a.b` is the key `b` of the object `a`."""


def feature(name: str, *keys: str, test: Callable[[Any], bool] = is_on) -> Feature:
    """Feature whose keys have the same test."""
    return Feature(name, dict.fromkeys(keys, test))


def feature_of_types(name: str, *types: str) -> Feature:
    """Feature of all models of these types, for which their configs have no key."""
    return Feature(name, {"model_type": has(*types)})


_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "dense_act_fn")

FEATURES = (
    feature("an encoder beside the decoder", "is_encoder_decoder"),
    feature("a vision part", "vision_config", "vision_tower_config", "thinker_config.vision_config"),
    feature("an audio part", "audio_config", "speech_config", "thinker_config.audio_config"),
    feature("a part that speaks", "talker_config"),
    feature("Mamba-1 layers", "mamba_dt_rank"),
    feature("short convolutions in attention", "conv_kernel_size", "cca_time0", "ple_conv_kernel_size"),
    feature("Kimi Delta Attention", "linear_num_heads", "linear_attn_config", "kda_lower_bound"),
    feature("linear attention beside sliding windows", "layer_types",
            test=has_all("linear_attention", "sliding_attention")),
    feature("sparse attention beside sliding windows", "layer_types",
            test=has_all("indexed_attention", "sliding_attention")),
    feature("lightning attention", "linear_attn_alpha_factor", "layernorm_linear_attention_alpha", "group_norm_size"),
    feature("sparse attention to blocks of tokens that an indexer selects", "index_topk_blocks"),
    feature("attention to compressed tokens", "compress_rates", "compress_ratios", "index_kpool"),
    feature("attention to reference tokens", "layer_types", test=has("reference_sliding_attention")),
    feature("attention heads as experts", "kv_channels"),
    feature("a dynamic attention mask", "keep_window_size"),
    feature("keys and values shared by layers", "num_kv_shared_layers", "kv_source_layers", "use_cla"),
    feature("attention scaled by position", "log_scaling_alpha"),
    feature("soft-capped attention scores", "attn_logit_softcapping"),
    feature("clipped queries and keys", "qk_l2_clip_threshold"),
    Feature("gates of attention heads", {"gating": is_on, "use_head_wise_attn_gate": is_on,
                                         "model_type": has("dots3_note_text", "beam")}),
    feature_of_types("normalized and scaled latents of MLA", "dots3_note_text"),
    feature("numbers of heads by layer", "num_attention_heads_per_layer", test=varies),
    feature("rotary positions by layer", "layer_rope_theta", test=varies),
    feature("rotary positions in several dimensions", "rope_parameters.mrope_section", "rope_scaling.mrope_section"),
    feature("learned relative positions", "d_rel", "relative_attention_num_buckets"),
    feature("ALiBi", "alibi", "use_alibi"),
    feature("hyper-connections in place of residuals", "hc_mult", "hc_count"),
    feature("attention over the outputs of layers", "n_layers_per_attn_res_block"),
    feature("gated residuals", "residual_gate_temperature"),
    feature_of_types("factors of residuals by depth", "beam"),
    feature("factors of residuals by kind of layer", "full_attn_alpha_factor", "mlp_alpha_factor",
            "layernorm_full_attention_alpha"),
    Feature("attention and feed-forward in parallel", {"use_parallel_residual": is_on, "parallel_attn": is_on,
                                                       "parallel_attn_mlp_res": is_on,
                                                       "model_type": has("cohere2_moe")}),
    feature("layers that are run repeatedly", "loop_num_passes"),
    feature("norms with a gate", "gated_norm_rank"),
    Feature("LayerNorm other than Phi-3.5-MoE's", {"layer_norm_eps": is_on, "model_type": has("dbrx")}),
    feature_of_types("a norm of the experts' sum in layers with experts alone", "axk1"),
    feature("embeddings per layer", "hidden_size_per_layer_input", "ple_embed_dim"),
    feature("embeddings of n-grams", "ngram_size", "oe_vocab_sizes"),
    feature("biases in all projections", "use_bias"),
    feature("GELU", *_ACTIVATIONS, test=has("gelu", "gelu_new")),
    feature("ReLU", *_ACTIVATIONS, test=has("relu")),
    feature("soft-capped feed-forward activations", "mlp_gate_softcap"),
    feature("experts of a projected input", "moe_hidden_size", "routed_expert_hidden_size"),
    feature("experts that return their input", "zero_expert_num"),
    feature("experts next to a dense layer in parallel", "expert_ffn_hidden_size"),
    feature("routing by a hash of the token", "mlp_layer_types", test=has("hash_moe")),
    feature("routers of several layers", "router_hidden_size"),
    feature_of_types("a selection bias of router logits", "kolibri1"),
    feature("soft-capped router logits", "moe_router_logit_softcapping", "router_logit_softcapping"),
    feature("gates normalized together with the shared experts'", "shared_expert_sink"),
    feature("capacity of experts", "expert_capacity"),
)  # fmt: skip


def missing_features(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the features that a config's keys show, and that are not implemented here, each with the keys."""
    text = config.get(TEXT_CONFIG)
    parts = {"": config, **({f"{TEXT_CONFIG}.": text} if isinstance(text, dict) else {})}
    for row in FEATURES:
        keys = [
            f"`{prefix}{key}`"
            for prefix, part in parts.items()
            for key, is_shown in row.keys.items()
            if is_shown(_value(part, key))
        ]
        if keys:
            yield f"{row.name} ({', '.join(keys)})"


def _value(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
