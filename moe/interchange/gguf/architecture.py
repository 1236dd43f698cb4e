"""llama.cpp's architectures, by our families: what each fixes, and what a file's metadata express."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec, LatentAttentionSpec

_LATENT = frozenset({
    "attention.query_rank", "attention.key_value_rank", "attention.rope_dim", "moe.shared_hidden_dim",
    "moe.routed_scaling_factor", "moe.renormalize_gates",
})  # fmt: skip
_SIGMOID = frozenset({"moe.routed_scaling_factor", "moe.renormalize_gates", "moe.shared_hidden_dim"})


@dataclass(frozen=True)
class Architecture:
    """Architecture of llama.cpp."""

    name: str
    """Its name in GGUF files, a value of `gguf.MODEL_ARCH_NAMES`."""
    allowed_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Allowed values of parts of a model's meaning, where they are not those of a plain decoder."""
    in_metadata: frozenset[str] = frozenset()
    """Parts of the meaning that its metadata express, in addition to `compatibility.ALWAYS_IN_METADATA`."""
    permutes_queries: bool = False
    """Whether rows of queries and keys are stored so that pairs of rotated dimensions are adjacent."""
    rope_scalings: tuple[str, ...] = ("linear", "yarn")
    """Kinds of RoPE scaling."""
    leading_dense: bool = False
    """Whether the first layers may be dense; otherwise all layers of a mixture have experts."""
    final_norm: str = "output_norm"
    """Name of the norm after the last layer."""
    windows: Literal["by_layer"] | int | None = None
    """Layers with a sliding window: any, which metadata name, or all but every n-th. There must be both kinds."""
    window_width: int | None = None
    """Width of windows, if it is fixed."""
    local_in_metadata: frozenset[str] = frozenset()
    """Parts of the meaning of `local_attention` that metadata express; others are those of `attention`."""
    feed_forward_norm: str = "ffn_norm"
    """Name of the norm before the feed-forward layer."""
    equal_heads: bool = False
    """Whether there must be as many key heads as query heads."""
    shared_width: bool = False
    """Whether metadata have the width of all shared experts together instead of their number."""
    expert_step: Literal["one", "any"] | None = None
    """Distance between layers with experts, if metadata have it."""
    rope_sections: bool = False
    """Whether metadata name the rotated dimensions of times, heights and widths, which are one position in texts."""
    parts_by_layer: bool = False
    """Whether each layer is one part, named by metadata: attention, experts or a dense layer."""
    experts_without_norms: int | None = None
    """Number of experts with which queries and keys have no norms, which they have in all other models."""
    dense_branch: bool = False
    """Whether shared experts are a dense layer beside the others, each with norms of its own."""
    fuses_queries: bool = False
    """Whether queries, keys and values are rows of one matrix."""
    gating: str | None = None
    """Function of router logits, if metadata name it: a name of `gguf.ExpertGatingFuncType`."""


_EXPERTS = {
    "moe.router": (None, "softmax_topk"), "moe.softmax": (None, "before_topk"), "moe.num_expert_groups": (None, 1),
    "moe.selection_bias": (None, False), "moe.activation": (None, "swiglu"),
}  # fmt: skip
_SIGMOID_EXPERTS = {
    **_EXPERTS, "moe.router": ("sigmoid_topk",), "moe.softmax": (None,), "moe.selection_bias": (True,),
}  # fmt: skip
_MLA = {"attention.kind": ("latent",), "attention.rope.pairing": ("interleaved",)}

LLAMA = Architecture(
    "llama", {**_EXPERTS, "moe.renormalize_gates": (None, True), "attention.bias": (True, False),
              "attention.output_bias": (True, False)},
    permutes_queries=True, rope_scalings=("linear", "yarn", "llama3"),
)  # fmt: skip

DEEPSEEK = Architecture(
    "deepseek2", {**_MLA, **_SIGMOID_EXPERTS}, _LATENT | {"moe.num_expert_groups"}, leading_dense=True,
    gating="SIGMOID",
)  # fmt: skip
GLM = Architecture(
    "glm4moe",
    {**_SIGMOID_EXPERTS, "attention.bias": (True, False), "attention.query_key_norm": (None, "head")},
    _SIGMOID | {"attention.rope.fraction"}, leading_dense=True, feed_forward_norm="post_attention_norm",
    gating="SIGMOID",
)  # fmt: skip
_MAMBA2 = frozenset({
    "linear_attention.conv_tokens", "linear_attention.head_dim", "linear_attention.min_time_step",
    "linear_attention.num_groups", "linear_attention.num_heads", "linear_attention.state_dim",
})  # fmt: skip
_QWEN3_NEXT = {
    **_EXPERTS, "attention.query_key_norm": ("head",), "attention.output_gate": (True,), "norm_one_plus": (True,),
    "linear_attention.kind": ("gated_delta_net",), "linear_attention.split_projections": (False,),
    "moe.renormalize_gates": (True,), "moe.shared_gate": (True,),
}  # fmt: skip
_DELTA_NET = frozenset({
    "attention.rope.fraction", "layers with full attention", "linear_attention.conv_tokens",
    "linear_attention.key_dim", "linear_attention.num_key_heads", "linear_attention.num_value_heads",
    "linear_attention.value_dim", "moe.shared_hidden_dim",
})  # fmt: skip
_GRANITE = frozenset({"embedding_multiplier", "residual_multiplier", "logits_divisor", "attention.scale"})
GRANITE = Architecture(
    "granitemoe", {**_EXPERTS, "moe.renormalize_gates": (True,)}, _GRANITE | {"moe.shared_hidden_dim"},
    permutes_queries=True, shared_width=True,
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "qwen2": Architecture("qwen2", {"attention.bias": (True,)}),
    "qwen3": Architecture("qwen3", {"attention.query_key_norm": ("head",)}),
    "qwen2_moe": Architecture(
        "qwen2moe",
        {**_EXPERTS, "attention.bias": (True,), "moe.renormalize_gates": (False,), "moe.shared_gate": (True,)},
        frozenset({"moe.shared_hidden_dim"}), shared_width=True,
    ),
    "qwen3_moe": Architecture(
        "qwen3moe", {**_EXPERTS, "attention.query_key_norm": ("head",), "moe.renormalize_gates": (True,)}
    ),
    "olmoe": Architecture(
        "olmoe", {**_EXPERTS, "attention.query_key_norm": ("width",), "moe.renormalize_gates": (False,)},
        equal_heads=True,
    ),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "gpt_oss": Architecture(
        "gpt-oss",
        {**_EXPERTS, "attention.bias": (True,), "attention.output_bias": (True,), "attention.sinks": (True,),
         "moe.renormalize_gates": (True,), "moe.activation": ("swiglu_clamped",), "moe.expert_bias": (True,),
         "moe.logit_bias": (True,), "moe.activation_alpha": (1.702,), "moe.activation_limit": (7.0,)},
        windows=2, feed_forward_norm="post_attention_norm",
    ),
    "deepseek_v2": Architecture("deepseek2", {**_MLA, **_EXPERTS}, _LATENT, leading_dense=True, gating="SOFTMAX"),
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "glm4_moe": GLM,
    "solar_open": GLM,
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        {**_EXPERTS, "attention.rope.pairing": ("interleaved",), "moe.renormalize_gates": (True,),
         "moe.selection_bias": (True,)},
        frozenset({"moe.shared_hidden_dim"}), leading_dense=True, shared_width=True, expert_step="one",
    ),
    "hunyuan_v1_moe": Architecture(
        "hunyuan-moe",
        {**_EXPERTS, "attention.query_key_norm": ("head",), "attention.norm_after_rope": (True,),
         "moe.renormalize_gates": (True,)},
        frozenset({"moe.shared_hidden_dim"}), shared_width=True,
    ),
    "lfm2_moe": Architecture(
        "lfm2moe",
        {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("head",), "linear_attention.kind": ("short_convolution",),
         "linear_attention.bias": (False,), "moe.renormalize_gates": (True,), "tie_embeddings": (True,)},
        frozenset({"layers with full attention", "linear_attention.conv_tokens"}), leading_dense=True,
        final_norm="token_embd_norm", gating="SIGMOID",
    ),
    "dots1": Architecture(
        "dots1", {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("head",)}, _SIGMOID, leading_dense=True,
        equal_heads=True, gating="SIGMOID",
    ),
    "bailing_moe_v2": Architecture(
        "bailingmoe2",
        {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("head",), "tie_embeddings": (False,)},
        _SIGMOID | {"attention.rope.fraction", "moe.num_expert_groups"}, leading_dense=True, shared_width=True,
        fuses_queries=True, gating="SIGMOID",
    ),
    "qwen3_next": Architecture(
        "qwen3next", _QWEN3_NEXT, _DELTA_NET, shared_width=True,
        feed_forward_norm="post_attention_norm",
    ),
    "qwen3_5_moe_text": Architecture(
        "qwen35moe", {**_QWEN3_NEXT, "linear_attention.split_projections": (True,)}, _DELTA_NET, shared_width=True,
        feed_forward_norm="post_attention_norm", rope_sections=True,
    ),
    "nemotron_h": Architecture(
        "nemotron_h_moe",
        {**_SIGMOID_EXPERTS, "attention.rope.fraction": (0.0,), "ffn_activation": ("relu2", None),
         "moe.activation": ("relu2",), "linear_attention.kind": ("mamba2",), "linear_attention.bias": (False,),
         "linear_attention.conv_bias": (True,)},
        _SIGMOID | _MAMBA2 | {"layers with a feed-forward layer", "layers with full attention", "moe.latent_dim"},
        rope_scalings=(), parts_by_layer=True, feed_forward_norm="attn_norm", shared_width=True, gating="SIGMOID",
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        {**_EXPERTS, "attention.rope.fraction": (0.0, 1.0), "linear_attention.kind": ("mamba2",),
         "linear_attention.bias": (False,), "linear_attention.conv_bias": (True,), "moe.renormalize_gates": (True,)},
        _GRANITE | _MAMBA2 | {"layers with full attention", "moe.shared_hidden_dim"}, permutes_queries=True,
        rope_scalings=(), shared_width=True,
    ),
    "mistral4": Architecture(
        "mistral4", {**_MLA, **_EXPERTS, "attention.query_scaling.first_position": (0,)},
        _LATENT | {"attention.query_scaling.coefficient", "attention.query_scaling.tokens"}, leading_dense=True,
        gating="SOFTMAX",
    ),
    "llama4_text": Architecture(
        "llama4",
        {**_EXPERTS, "moe.router": (None, "sigmoid_topk"), "moe.softmax": (None,), "moe.apply_gates_to": ("inputs",),
         "attention.rope.fraction": (0.0,), "attention.query_scaling.coefficient": (0.1,),
         "attention.query_scaling.tokens": (8192,), "attention.query_scaling.first_position": (1,),
         "local_attention.rope.fraction": (1.0,), "local_attention.rope.pairing": ("interleaved",),
         "local_attention.query_key_norm": (None, "unscaled"), "local_attention.norm_after_rope": (True, False),
         "local_attention.window_kind": ("chunk",)},
        frozenset({"moe.shared_hidden_dim"}), rope_scalings=("linear", "yarn", "llama3"), windows=4, window_width=8192,
        local_in_metadata=frozenset({"rope.base"}), expert_step="any", experts_without_norms=128,
    ),
    "gemma4_text": Architecture(
        "gemma4",
        {**_EXPERTS, "moe.activation": (None, "geglu_tanh"), "moe.renormalize_gates": (None, True),
         "moe.router_norm": (None, True), "moe.expert_scale": (None, True), "moe.branch_norms": (None, True),
         "attention.query_key_norm": ("head",), "attention.value_norm": (True,), "attention.scale": (1.0,),
         "attention.keys_as_values": (True, False), "attention.rope.proportional": (True,),
         "local_attention.keys_as_values": (False,), "local_attention.rope.proportional": (False,),
         "local_attention.rope.fraction": (1.0,), "embedding_multiplier": ("sqrt_model_dim",),
         "ffn_activation": ("geglu_tanh", None), "layer_scalar": (True,), "norm_placement": ("sandwich",)},
        frozenset({"attention.rope.fraction", "logits_cap", "moe.shared_hidden_dim"}), rope_scalings=(),
        windows="by_layer", local_in_metadata=frozenset({"head_dim", "num_kv_heads", "rope.base", "value_dim"}),
        dense_branch=True,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        {"attention.query_key_norm": ("head",), "embedding_multiplier": ("sqrt_model_dim",),
         "ffn_activation": ("geglu_tanh",), "norm_one_plus": (True,), "norm_placement": ("sandwich",)},
        rope_scalings=("linear",), windows=6, local_in_metadata=frozenset({"rope.base"}),
    ),
    "exaone_moe": Architecture(
        "exaone-moe",
        {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("head",), "attention.rope.fraction": (0.0,),
         "local_attention.rope.fraction": (1.0,)},
        _SIGMOID, rope_scalings=(), leading_dense=True, windows=4, local_in_metadata=frozenset({"rope.base"}),
        gating="SIGMOID",
    ),
    "mimo_v2_flash": Architecture(
        "mimo2",
        {**_SIGMOID_EXPERTS, "local_attention.sinks": (True, False), "moe.renormalize_gates": (True,)},
        frozenset({"attention.rope.fraction", "attention.value_multiplier"}), rope_scalings=(), leading_dense=True,
        windows="by_layer", local_in_metadata=frozenset({"rope.base", "num_kv_heads"}), gating="SIGMOID",
    ),
    "minimax_m2": Architecture(
        "minimax-m2",
        {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("width",), "moe.renormalize_gates": (True,)},
        frozenset({"attention.rope.fraction"}), gating="SIGMOID",
    ),
}  # fmt: skip
"""By `model_type`."""

FAMILIES = tuple(sorted(ARCHITECTURES))


def rotated_attention(spec: LanguageModelSpec) -> GroupedQueryAttentionSpec | LatentAttentionSpec:
    """Attention of all layers with rotary positions, or of those without a window if all have them."""
    return spec.local_attention or spec.attention if spec.attention.rope.fraction == 0 else spec.attention
