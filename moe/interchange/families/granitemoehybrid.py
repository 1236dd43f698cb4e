"""Granite 4: Mamba-2, and grouped-query attention in some layers, with experts and a shared expert or dense."""

from math import inf
from typing import Any

from moe.interchange.families.decoder import DECODER, mamba2
from moe.interchange.families.granitemoe import GRANITE_MOE_SHARED
from moe.interchange.family import Family, Field, Fields, in_layers, part
from moe.interchange.fields import Heads, Key, Scale, Switch, always, value
from moe.interchange.layer_types import AttentionLayers
from moe.interchange.reading import Reading
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec


class _FeedForward(Field):
    """Experts and a shared expert in every layer, or dense layers of the shared expert's width without experts."""

    keys = (
        "num_local_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size",
        "router_aux_loss_coef",
    )  # fmt: skip

    def read(self, config: Reading) -> Fields:
        shared_dim = config.get("shared_intermediate_size", int)
        if not (num_experts := config.get("num_local_experts", int, null=0)):
            return {"ffn_dim": shared_dim}
        return {
            "moe.num_experts": num_experts, "moe.top_k": config.get("num_experts_per_tok", int),
            "moe.hidden_dim": config.get("intermediate_size", int), "moe.shared_hidden_dim": shared_dim,
            "moe.router": "softmax_topk", "moe.softmax": "after_topk", "moe.activation": "swiglu",
            "moe.aux_coefficient": 0.0,
        }  # fmt: skip

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        if spec.moe is None:
            width = spec.ffn_dim or spec.model_dim
            return {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": width,
                    "shared_intermediate_size": width}  # fmt: skip
        return {
            "num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.experts_per_token,
            "intermediate_size": spec.moe.hidden_dim, "shared_intermediate_size": spec.moe.shared_hidden_dim or 0,
            "router_aux_loss_coef": float(value(spec, "moe.aux_coefficient") or 0),
        }  # fmt: skip


class _HeadDim(Field):
    """Dimension of Mamba-2's heads: `mamba_expand` times the model dimension over their number."""

    keys = ("mamba_d_head", "mamba_expand")

    def read(self, config: Reading) -> Fields:
        heads, width = config.get("mamba_n_heads", int), config.get("hidden_size", int)
        expand = config.get("mamba_expand", int)
        if not heads or not width or not expand:
            return {}
        if config.raw("mamba_d_head") in ("auto", None):
            return {"linear_attention.head_dim": expand * width // heads}
        head_dim = config.get("mamba_d_head", int)
        if head_dim and head_dim * heads != expand * width:
            rule = f"times mamba_n_heads (={heads}) must be mamba_expand (={expand}) times hidden_size (={width})"
            config.refuse("mamba_d_head", head_dim, rule, "correct config.json", code="mismatch")
        return {"linear_attention.head_dim": head_dim}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        heads, head_dim = value(spec, "linear_attention.num_heads"), value(spec, "linear_attention.head_dim")
        if not heads or not head_dim:
            return {}
        return {"mamba_d_head": head_dim, "mamba_expand": heads * head_dim // spec.model_dim}


class _TimeSteps(Field):
    """Bounds of time steps, the upper one infinite: in JSON `{"__float__": "Infinity"}`."""

    keys = ("time_step_limit",)

    def read(self, config: Reading) -> Fields:
        limits = config.raw("time_step_limit")
        if limits is None:
            return {}
        if not isinstance(limits, list | tuple) or len(limits) != 2 or limits[1] not in _INFINITE:
            rule = "must be two numbers, of which the second is infinite; nothing else is supported"
            config.refuse("time_step_limit", None, rule)
            return {}
        return {"linear_attention.min_time_step": limits[0]}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        low = value(spec, "linear_attention.min_time_step")
        return {"time_step_limit": [low, {"__float__": "Infinity"}]} if low else {}


_INFINITE = (inf, "Infinity", {"__float__": "Infinity"})

GRANITE_MOE_HYBRID = Family(
    model_types=("granitemoehybrid",),
    architecture="GraniteMoeHybridForCausalLM",
    defaults={
        **GRANITE_MOE_SHARED.defaults, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    fields=(
        *DECODER,
        Heads(),
        Rope(has_type_key=True),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        Scale("attention_multiplier"),
        Key("embedding_multiplier", "embedding_multiplier", float),
        Key("residual_multiplier", "residual_multiplier", float),
        Key("logits_scaling", "logits_divisor", float),
        AttentionLayers(("mamba", "linear_attention"), ("attention", "full_attention"), default="mamba"),
        Key("mamba_n_heads", "linear_attention.num_heads"),
        Key("mamba_n_groups", "linear_attention.num_groups"),
        Key("mamba_d_state", "linear_attention.state_dim"),
        _HeadDim(),
        Key("mamba_d_conv", "linear_attention.conv_tokens"),
        Key("mamba_conv_bias", "linear_attention.conv_bias", bool),
        Key("mamba_proj_bias", "linear_attention.bias", bool),
        _TimeSteps(),
        _FeedForward(),
        always(linear_attention__kind="mamba2"),
    ),
    only={"normalization_function": ("rmsnorm",)},
    unused_keys={"mamba_chunk_size": "chunks do not change the result; ours have 64 positions"},
    aliases={"layers_block_type": "layer_types"},
    tensors=(
        *GRANITE_MOE_SHARED.tensors,
        *mamba2("mamba"),
        *in_layers(
            part("feed_forward.dense.w_gate.weight", "h m", "shared_mlp.input_linear.weight", "(0/2 h) m"),
            part("feed_forward.dense.w_in.weight", "h m", "shared_mlp.input_linear.weight", "(1/2 h) m"),
            part("feed_forward.dense.w_out.weight", "m h", "shared_mlp.output_linear.weight", "m h"),
        ),
    ),
    fused_tensors=GRANITE_MOE_SHARED.fused_tensors,
)  # fmt: skip
