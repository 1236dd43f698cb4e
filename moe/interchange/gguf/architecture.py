"""llama.cpp's architectures, by our families, and the models that each computes as we do.

Much of a model is fixed by its architecture in llama.cpp, and not by the file's metadata: the order of rotated
dimensions, whether weights of experts are normalised, which layers have experts. A model that differs is refused, since
llama.cpp would load it and compute something else.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe.interchange.config import family_of, meaning
from moe.interchange.gguf.recurrent import REMEDY, recurrent_problems
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.language import GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.rope import YarnScaling

WRITTEN = frozenset({
    "model_dim", "num_layers", "vocab_size", "tie_embeddings", "norm_eps", "ffn_dim",
    "attention.num_heads", "attention.num_kv_heads", "attention.head_dim", "attention.value_dim",
    "attention.rope.base", "moe.top_k", "moe.num_experts", "moe.model_dim", "moe.hidden_dim",
    "moe.expert_groups_per_token", "moe.renormalize_eps",
})  # fmt: skip
"""Parts of a model's meaning that metadata express in every architecture, or that follow from others."""

CHECKED = ("attention.rope.scaling.", "layers with experts", "windows of layers", "attention.scale")
"""Parts that have a check of their own."""

_LAYERS_WITHOUT_QUERY_RANK = (26, 27)
"""llama.cpp knows DeepSeek-V2-Lite and Moonlight, whose queries have no latent, by their number of layers."""
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
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that parts of a model's meaning may have, where they are not those of a plain decoder."""
    written: frozenset[str] = frozenset()
    """Parts of the meaning that its metadata express, in addition to `WRITTEN`."""
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
    written_local: frozenset[str] = frozenset()
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
        written_local=frozenset({"rope.base"}), expert_step="any", experts_without_norms=128,
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
        windows="by_layer", written_local=frozenset({"head_dim", "num_kv_heads", "rope.base", "value_dim"}),
        dense_branch=True,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        {"attention.query_key_norm": ("head",), "embedding_multiplier": ("sqrt_model_dim",),
         "ffn_activation": ("geglu_tanh",), "norm_one_plus": (True,), "norm_placement": ("sandwich",)},
        rope_scalings=("linear",), windows=6, written_local=frozenset({"rope.base"}),
    ),
    "exaone_moe": Architecture(
        "exaone-moe",
        {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("head",), "attention.rope.fraction": (0.0,),
         "local_attention.rope.fraction": (1.0,)},
        _SIGMOID, rope_scalings=(), leading_dense=True, windows=4, written_local=frozenset({"rope.base"}),
        gating="SIGMOID",
    ),
    "mimo_v2_flash": Architecture(
        "mimo2",
        {**_SIGMOID_EXPERTS, "local_attention.sinks": (True, False), "moe.renormalize_gates": (True,)},
        frozenset({"attention.rope.fraction", "attention.value_multiplier"}), rope_scalings=(), leading_dense=True,
        windows="by_layer", written_local=frozenset({"rope.base", "num_kv_heads"}), gating="SIGMOID",
    ),
    "minimax_m2": Architecture(
        "minimax-m2",
        {**_SIGMOID_EXPERTS, "attention.query_key_norm": ("width",), "moe.renormalize_gates": (True,)},
        frozenset({"attention.rope.fraction"}), gating="SIGMOID",
    ),
}  # fmt: skip
"""By `model_type`."""

FAMILIES = tuple(sorted(ARCHITECTURES))


def _plain() -> dict[str, Any]:
    """Meaning of a plain decoder with experts: the values of features that an architecture lacks."""
    attention = GroupedQueryAttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2)
    moe = {"num_experts": 1, "hidden_dim": 1, "model_dim": 1, "router": "softmax_topk", "top_k": 1}
    fields: dict[str, Any] = {"kind": "language", "model_dim": 1, "num_layers": 1, "vocab_size": 1, "moe": moe}
    return {**meaning(LanguageModelSpec(**fields, attention=attention)), "ffn_activation": "swiglu"}


def rotated_attention(spec: LanguageModelSpec) -> GroupedQueryAttentionSpec | LatentAttentionSpec:
    """Attention of all layers with rotary positions, or of those without a window if all have them."""
    return spec.local_attention or spec.attention if spec.attention.rope.fraction == 0 else spec.attention


def architecture_of(spec: LanguageModelSpec, config: Mapping[str, Any]) -> Architecture:
    """Architecture of a model with this Hugging Face config. Raises SpecError if llama.cpp has none that computes the
    model."""
    family = family_of(config, "config.json").model_types[0]
    if (architecture := ARCHITECTURES.get(family)) is None:
        rule = f"is not a family that can be written as GGUF; those that can: {', '.join(FAMILIES)}"
        raise SpecError([Problem("unsupported", "model_type", family, rule, REMEDY)])
    if problems := list(_problems(spec, architecture)):
        raise SpecError(problems)
    return architecture


def _problems(spec: LanguageModelSpec, architecture: Architecture) -> Iterator[Problem]:
    """Yield what llama.cpp's architecture does not compute."""
    rule = f"is not computed by llama.cpp's architecture {architecture.name}"
    plain, values = _plain(), meaning(spec)
    for path in sorted(values.keys() | architecture.fixed.keys()):
        if path in architecture.written or path.startswith(CHECKED) or path in WRITTEN - architecture.fixed.keys():
            continue
        value = values.get(path)
        if spec.moe is None and path.startswith("moe."):
            continue
        allowed_values = architecture.fixed.get(path, (plain.get(path),))
        if path.startswith("layers with"):
            if path == "layers with local attention" and architecture.windows is not None:
                continue
            allowed_values = ([] if path == "layers with local attention" else list(range(spec.num_layers)),)
        if path.startswith("local_attention.") and path not in architecture.fixed:
            name = path.removeprefix("local_attention.")
            is_checked = name.startswith("rope.scaling.") and rotated_attention(spec) is spec.local_attention
            if name in architecture.written_local or is_checked:
                continue
            allowed_values = (values.get(f"attention.{name}"), "sliding" if name == "window_kind" else None)
        if value not in allowed_values:
            yield Problem("unsupported", f"model.{path}", value, rule, REMEDY)
    first = spec.moe_layers[0] if spec.moe_layers and architecture.leading_dense else 0
    step = spec.moe_layers[0] + 1 if spec.moe_layers and architecture.expert_step == "any" else 1
    layers = [layer for layer in range(spec.num_layers) if spec.has_feed_forward(layer) and (layer + 1) % step == 0]
    if spec.moe is not None and list(spec.moe_layers) != [layer for layer in layers if layer >= first]:
        yield Problem("unsupported", "model.layers with experts", list(spec.moe_layers), rule, REMEDY)
    windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
    if windows != _possible_windows(spec, architecture):
        yield Problem("unsupported", "model.attention.window", windows, rule, REMEDY)
    attention = spec.attention
    if (
        isinstance(attention, GroupedQueryAttentionSpec)
        and "attention.scale" not in architecture.written
        and attention.score_scale not in architecture.fixed.get("attention.scale", (attention.head_dim**-0.5,))
    ):
        yield Problem("unsupported", "model.attention.scale", attention.scale, rule, REMEDY)
    if architecture.experts_without_norms is not None:
        norm = getattr(rotated_attention(spec), "query_key_norm", None)
        has_norms = spec.moe is None or spec.moe.num_experts != architecture.experts_without_norms
        if has_norms != (norm is not None):
            rule_of_norms = f"{rule}, which has norms unless there are {architecture.experts_without_norms} experts"
            yield Problem("unsupported", "model.local_attention.query_key_norm", norm, rule_of_norms, REMEDY)
    num_kv_heads = getattr(attention, "num_kv_heads", None)
    if architecture.equal_heads and num_kv_heads != attention.num_heads:
        yield Problem("unsupported", "model.attention.num_kv_heads", num_kv_heads, rule, REMEDY)
    if architecture.fuses_queries and attention.num_heads * attention.head_dim != spec.model_dim:
        rule_of_heads = f"{rule}, whose heads are as wide together as the model (={spec.model_dim})"
        yield Problem("unsupported", "model.attention.head_dim", attention.head_dim, rule_of_heads, REMEDY)
    if isinstance(attention, LatentAttentionSpec) and (attention.query_rank is None) != (
        spec.num_layers in _LAYERS_WITHOUT_QUERY_RANK
    ):
        rule_of_queries = f"{rule}, which has queries without a latent in models of 26 and 27 layers only"
        yield Problem("unsupported", "model.attention.query_rank", attention.query_rank, rule_of_queries, REMEDY)
    yield from recurrent_problems(spec, rule)
    yield from _rope_problems(spec, architecture, rule)


def _possible_windows(spec: LanguageModelSpec, architecture: Architecture) -> list[int | None]:
    """Windows by layer that the architecture has for a model with this window; of no model if it has none, or all
    layers have it."""
    layers, width = range(spec.num_layers), getattr(spec.local_attention or spec.attention, "window", None)
    if architecture.windows is None:
        return [None for _ in layers]
    if architecture.windows == "by_layer":
        has_window = [spec.window_of(layer) is not None for layer in layers]
    else:
        has_window = [(layer + 1) % architecture.windows > 0 for layer in layers]
    is_possible = width is not None and architecture.window_width in (None, width) and not all(has_window)
    return [width if has else None for has in has_window] if is_possible else []


def _rope_problems(spec: LanguageModelSpec, architecture: Architecture, rule: str) -> Iterator[Problem]:
    rotated = rotated_attention(spec)
    scaling = rotated.rope.scaling
    if scaling is None:
        return
    path = f"model.{'attention' if rotated is spec.attention else 'local_attention'}.rope.scaling"
    if scaling.kind not in architecture.rope_scalings:
        yield Problem("unsupported", f"{path}.kind", scaling.kind, rule, REMEDY)
    if not isinstance(scaling, YarnScaling):
        return
    if scaling.attention_factor is not None:
        yield Problem("unsupported", f"{path}.attention_factor", scaling.attention_factor, rule, REMEDY)
    is_latent = spec.attention.kind == "latent"
    if scaling.mscale != scaling.mscale_all_dim or (is_latent and not scaling.mscale):
        yield Problem("unsupported", f"{path}.mscale", scaling.mscale,
                      f"must equal mscale_all_dim (={scaling.mscale_all_dim}) in llama.cpp", REMEDY)  # fmt: skip
    if not scaling.truncate and architecture.name != "gpt-oss":
        yield Problem("unsupported", f"{path}.truncate", False, rule, REMEDY)
