"""Compatibility of a model with llama.cpp's architecture of its family.

Much of a model is fixed by its architecture in llama.cpp, and not by the file's metadata: the order of rotated
dimensions, whether weights of experts are normalised, which layers have experts. A model that differs is refused, since
llama.cpp would load it and compute something else.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moe.interchange.config import family_of, meaning
from moe.interchange.gguf.architecture import ARCHITECTURES, FAMILIES, Architecture, rotated_attention
from moe.interchange.gguf.recurrent import REMEDY, recurrent_problems
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.language import GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.rope import YarnScaling

ALWAYS_IN_METADATA = frozenset({
    "model_dim", "num_layers", "vocab_size", "tie_embeddings", "norm_eps", "ffn_dim",
    "attention.num_heads", "attention.num_kv_heads", "attention.head_dim", "attention.value_dim",
    "attention.rope.base", "moe.top_k", "moe.num_experts", "moe.model_dim", "moe.hidden_dim",
    "moe.expert_groups_per_token", "moe.renormalize_eps",
})  # fmt: skip
"""Parts of a model's meaning that metadata express in every architecture, or that follow from others."""

CHECKED_APART = ("attention.rope.scaling.", "layers with experts", "windows of layers", "attention.scale")
"""Parts that have a check of their own."""

_LAYERS_WITHOUT_QUERY_RANK = (26, 27)
"""llama.cpp knows DeepSeek-V2-Lite and Moonlight, whose queries have no latent, by their number of layers."""


def _plain_meaning() -> dict[str, Any]:
    """Meaning of a plain decoder with experts: the values of features that an architecture lacks."""
    attention = GroupedQueryAttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2)
    moe = {"num_experts": 1, "hidden_dim": 1, "model_dim": 1, "router": "softmax_topk", "top_k": 1}
    fields: dict[str, Any] = {"kind": "language", "model_dim": 1, "num_layers": 1, "vocab_size": 1, "moe": moe}
    return {**meaning(LanguageModelSpec(**fields, attention=attention)), "ffn_activation": "swiglu"}


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
    yield from _value_problems(spec, architecture, rule)
    yield from _layer_problems(spec, architecture, rule)
    yield from _attention_problems(spec, architecture, rule)
    yield from recurrent_problems(spec, rule)
    yield from _rope_problems(spec, architecture, rule)


def _value_problems(spec: LanguageModelSpec, architecture: Architecture, rule: str) -> Iterator[Problem]:
    """Yield the parts of a model's meaning with a value that the architecture does not have."""
    plain, values = _plain_meaning(), meaning(spec)
    for path in sorted(values.keys() | architecture.allowed_values.keys()):
        if path in architecture.in_metadata or path.startswith(CHECKED_APART):
            continue
        if path in ALWAYS_IN_METADATA - architecture.allowed_values.keys() or (
            spec.moe is None and path.startswith("moe.")
        ):
            continue
        allowed_values = architecture.allowed_values.get(path, (plain.get(path),))
        if path.startswith("layers with"):
            if path == "layers with local attention" and architecture.windows is not None:
                continue
            allowed_values = ([] if path == "layers with local attention" else list(range(spec.num_layers)),)
        if path.startswith("local_attention.") and path not in architecture.allowed_values:
            name = path.removeprefix("local_attention.")
            is_checked = name.startswith("rope.scaling.") and rotated_attention(spec) is spec.local_attention
            if name in architecture.local_in_metadata or is_checked:
                continue
            allowed_values = (values.get(f"attention.{name}"), "sliding" if name == "window_kind" else None)
        if (value := values.get(path)) not in allowed_values:
            yield Problem("unsupported", f"model.{path}", value, rule, REMEDY)


def _layer_problems(spec: LanguageModelSpec, architecture: Architecture, rule: str) -> Iterator[Problem]:
    """Yield layers with experts, or with windows, where the architecture does not have them."""
    first = spec.moe_layers[0] if spec.moe_layers and architecture.leading_dense else 0
    step = spec.moe_layers[0] + 1 if spec.moe_layers and architecture.expert_step == "any" else 1
    layers = [layer for layer in range(spec.num_layers) if spec.has_feed_forward(layer) and (layer + 1) % step == 0]
    if spec.moe is not None and list(spec.moe_layers) != [layer for layer in layers if layer >= first]:
        yield Problem("unsupported", "model.layers with experts", list(spec.moe_layers), rule, REMEDY)
    windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
    if windows != _possible_windows(spec, architecture):
        yield Problem("unsupported", "model.attention.window", windows, rule, REMEDY)


def _attention_problems(spec: LanguageModelSpec, architecture: Architecture, rule: str) -> Iterator[Problem]:
    """Yield the scale, norms and heads of attention that the architecture does not have."""
    attention = spec.attention
    if (
        isinstance(attention, GroupedQueryAttentionSpec)
        and "attention.scale" not in architecture.in_metadata
        and attention.score_scale not in architecture.allowed_values.get("attention.scale", (attention.head_dim**-0.5,))
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
    rotary = rotated_attention(spec)
    scaling = rotary.rope.scaling
    if scaling is None:
        return
    path = f"model.{'attention' if rotary is spec.attention else 'local_attention'}.rope.scaling"
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
