"""Metadata of a GGUF file: hyperparameters under the names that llama.cpp reads."""

from typing import TYPE_CHECKING

from moe.interchange.gguf.architecture import Architecture, rotated_attention
from moe.interchange.gguf.recurrent import add_recurrence
from moe.spec import LanguageModelSpec
from moe.spec.language import GatedDeltaNetSpec, GroupedQueryAttentionSpec
from moe.spec.rope import LinearScaling, YarnScaling
from moe.spec.routers.router import GatedTopKSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter


def add_hyperparameters(
    writer: "GGUFWriter", spec: LanguageModelSpec, architecture: Architecture, max_tokens: int
) -> None:
    """Add the hyperparameters of a model that `architecture_of` accepted. `max_tokens`: its longest sequence."""
    writer.add_context_length(max_tokens)
    writer.add_block_count(spec.num_layers)
    writer.add_embedding_length(spec.model_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    experts_dim = 0 if spec.moe is None else spec.moe.hidden_dim
    if architecture.parts_by_layer:
        layers = range(spec.num_layers)
        widths = [experts_dim if layer in spec.moe_layers else spec.ffn_dim or 0 for layer in layers]
        writer.add_feed_forward_length(
            [width if spec.has_feed_forward(layer) else 0 for layer, width in enumerate(widths)]
        )
    elif architecture.dense_branch and spec.moe is not None and spec.moe.shared_hidden_dim is not None:
        writer.add_feed_forward_length(spec.moe.shared_hidden_dim)
    else:
        writer.add_feed_forward_length(spec.ffn_dim or experts_dim)
    _add_attention(writer, spec, architecture)
    _add_rope_scaling(writer, spec)
    if spec.moe is not None:
        _add_experts(writer, spec, architecture)
    add_recurrence(writer, spec)
    if architecture.dense_branch:
        writer.add_embedding_length_per_layer_input(0)
        writer.add_shared_kv_layers(0)
    if "logits_cap" in architecture.in_metadata:
        writer.add_final_logit_softcapping(spec.logits_cap or 0.0)  # without the key it would be 30
    if "residual_multiplier" in architecture.in_metadata:
        assert isinstance(spec.embedding_multiplier, float)
        assert isinstance(spec.attention, GroupedQueryAttentionSpec)
        writer.add_embedding_scale(spec.embedding_multiplier)
        writer.add_residual_scale(spec.residual_multiplier)
        writer.add_logit_scale(spec.logits_divisor)
        writer.add_attention_scale(spec.attention.score_scale)


def _add_attention(writer: "GGUFWriter", spec: LanguageModelSpec, architecture: Architecture) -> None:
    attention = spec.attention
    writer.add_head_count(attention.num_heads)
    writer.add_rope_freq_base(rotated_attention(spec).rope.base)
    if isinstance(attention, GroupedQueryAttentionSpec):
        by_layer = [spec.attention_of(layer) if spec.has_attention(layer) else None for layer in range(spec.num_layers)]
        num_kv_heads = [kind.num_kv_heads if isinstance(kind, GroupedQueryAttentionSpec) else 0 for kind in by_layer]
        if isinstance(spec.linear_attention, GatedDeltaNetSpec):
            num_kv_heads = [attention.num_kv_heads]
        writer.add_head_count_kv(num_kv_heads if len(set(num_kv_heads)) > 1 else num_kv_heads[0])
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.value_head_dim)
        rotary = rotated_attention(spec)
        assert isinstance(rotary, GroupedQueryAttentionSpec)
        if (rotated_dim := rotary.rope.rotated_dim(rotary.head_dim)) > 0:
            writer.add_rope_dimension_count(rotated_dim)
            if architecture.rope_sections:
                writer.add_rope_dimension_sections([(rotated_dim // 2 + 2 - place) // 3 for place in range(3)] + [0])
        else:
            writer.add_rope_scaling_finetuned(False)  # by which granitehybrid knows that it has no positions
        if attention.value_multiplier != 1:
            writer.add_float32(f"{writer.arch}.attention.value_scale", attention.value_multiplier)
        if attention.window is not None:
            writer.add_sliding_window(attention.window)
        if spec.local_attention is not None:
            local = spec.local_attention
            assert local.window is not None
            writer.add_sliding_window(local.window)
            if "head_dim" in architecture.local_in_metadata:
                writer.add_key_length_swa(local.head_dim)
                writer.add_value_length_swa(local.value_head_dim)
                writer.add_rope_dimension_count_swa(local.rope.rotated_dim(local.head_dim))
            if architecture.windows == "by_layer":
                layers = range(spec.num_layers)
                writer.add_sliding_window_pattern([spec.has_local_attention(layer) for layer in layers])
            writer.add_rope_freq_base_swa(local.rope.base)
        return
    if attention.query_scaling is not None:
        writer.add_attn_temperature_scale(attention.query_scaling.coefficient)
        writer.add_attn_temperature_length(attention.query_scaling.tokens)
    # llama.cpp computes latent attention as attention to the latent, which is one key and value head
    writer.add_head_count_kv(1)
    writer.add_key_length(attention.key_value_rank + attention.rope_dim)
    writer.add_value_length(attention.key_value_rank)
    writer.add_key_length_mla(attention.head_dim + attention.rope_dim)
    writer.add_value_length_mla(attention.value_dim)
    writer.add_kv_lora_rank(attention.key_value_rank)
    if attention.query_rank is not None:
        writer.add_q_lora_rank(attention.query_rank)
    writer.add_rope_dimension_count(attention.rope_dim)


def _add_rope_scaling(writer: "GGUFWriter", spec: LanguageModelSpec) -> None:
    from gguf import RopeScalingType

    scaling = rotated_attention(spec).rope.scaling
    if isinstance(scaling, LinearScaling):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    if isinstance(scaling, YarnScaling):
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_tokens)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
        if scaling.mscale_all_dim is not None:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling.mscale_all_dim)


def _add_experts(writer: "GGUFWriter", spec: LanguageModelSpec, architecture: Architecture) -> None:
    from gguf import ExpertGatingFuncType

    moe = spec.moe
    assert moe is not None
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.experts_per_token)
    writer.add_expert_feed_forward_length(moe.hidden_dim)
    if "moe.latent_dim" in architecture.in_metadata and moe.latent_dim is not None:
        writer.add_moe_latent_size(moe.latent_dim)
    if architecture.leading_dense:
        writer.add_leading_dense_block_count(spec.moe_layers[0])
    if architecture.expert_step is not None:
        writer.add_interleave_moe_layer_step(spec.moe_layers[0] + 1 if architecture.expert_step == "any" else 1)
    if moe.shared_hidden_dim is not None and not architecture.dense_branch:
        if architecture.shared_width:
            writer.add_expert_shared_feed_forward_length(moe.shared_hidden_dim)
            writer.add_expert_shared_count(1)
        else:
            writer.add_expert_shared_count(moe.shared_hidden_dim // moe.hidden_dim)
    if architecture.gating is not None:
        routing = moe.resolved.routing
        assert isinstance(routing, GatedTopKSpec)
        writer.add_expert_gating_func(ExpertGatingFuncType[architecture.gating])
        writer.add_expert_weights_norm(bool(routing.renormalize_gates))
        writer.add_expert_weights_scale(routing.routed_scaling_factor)
        if (groups := routing.num_expert_groups) > 1:
            writer.add_expert_group_count(groups)
            writer.add_expert_group_used_count(routing.expert_groups_per_token)
