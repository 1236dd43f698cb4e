"""Rules between the fields of a language model."""

from collections.abc import Iterator
from dataclasses import replace

from moe.spec.errors import Problem
from moe.spec.language.attention import GroupedQueryAttentionSpec
from moe.spec.language.fields import LanguageModelFields
from moe.spec.moe import MoESpec

_LAYER_LISTS = ("dense_layers", "attention_layers", "feed_forward_layers", "local_layers")
_FIELDS_OF_PARTS = {
    "moe": ("moe_every", "first_dense_layers", "dense_layers"),
    "linear_attention": ("full_attention_every", "attention_layers"),
    "local_attention": ("local_layers",),
}  # fmt: skip
"""Fields that have an effect only beside another."""


def model_problems(spec: LanguageModelFields) -> Iterator[Problem]:
    """Yield the rules that a model breaks, apart from those on its adapter and its upcycling."""
    if spec.moe is not None:
        yield from _problems_of_mixture(spec, spec.moe)
    if spec.norm_kind == "layer":
        yield from _problems_of_layer_norms(spec)
    if spec.ffn_dim is None and spec.dense_ffn_layers:
        yield Problem("missing", "ffn_dim", None, "is required where layers have no experts", "add it")
    if spec.linear_attention is not None and spec.full_attention_every == 1 and spec.attention_layers is None:
        remedy = "set how many layers there are per full-attention layer; Qwen3-Next has 4"
        yield Problem("empty", "full_attention_every", 1, "leaves no layer with linear_attention", remedy)
    if spec.local_attention is not None:
        yield from _problems_of_local_attention(spec, spec.local_attention)
    yield from _layers_beyond_the_last(spec)
    if spec.indexer is not None:
        indexer_layers = [layer for layer in range(spec.num_layers) if spec.attention_of(layer) is spec.attention]
        yield from spec.indexer.layer_problems(indexer_layers, spec.num_layers)
    for part, names in _FIELDS_OF_PARTS.items():
        for name in names if getattr(spec, part) is None else ():
            if (value := getattr(spec, name)) != type(spec).model_fields[name].default:
                yield Problem("not_applicable", name, value, f"has no effect without {part}", "omit it")
    if spec.attention_layers is not None and spec.full_attention_every > 1:
        rule = "has no effect with attention_layers"
        yield Problem("conflict", "full_attention_every", spec.full_attention_every, rule, "omit one")
    if shared_layers := set(spec.attention_layers or ()) & set(spec.feed_forward_layers or ()):
        rule = "must not be in feed_forward_layers, whose layers have no attention"
        yield Problem("conflict", "attention_layers", min(shared_layers), rule, "omit it in one of them")


def _problems_of_mixture(spec: LanguageModelFields, moe: MoESpec) -> Iterator[Problem]:
    if moe.model_dim != spec.model_dim:
        rule = f"must equal model_dim (={spec.model_dim})"
        yield Problem("mismatch", "moe.model_dim", moe.model_dim, rule, "omit it")
    if not spec.moe_layers:
        remedy = "lower it or first_dense_layers, or omit moe"
        yield Problem("empty", "moe_every", spec.moe_every, "leaves no layer with experts", remedy)
    if (problem := moe.routing.not_causal()) is not None:
        yield replace(problem, path=f"moe.{problem.path}")
    if moe.branch_norms and (spec.norm_placement != "sandwich" or spec.norm_one_plus):
        rule = "requires norm_placement: sandwich, without norm_one_plus"
        yield Problem("requires", "moe.branch_norms", True, rule, "change them, or omit it")


def _problems_of_layer_norms(spec: LanguageModelFields) -> Iterator[Problem]:
    rule = "applies to RMS norms only, not to norm_kind: layer"
    if spec.norm_one_plus:
        yield Problem("conflict", "norm_one_plus", True, rule, "omit one of them")
    if spec.moe is not None and spec.moe.branch_norms:
        yield Problem("conflict", "moe.branch_norms", True, rule, "omit one of them")


def _problems_of_local_attention(spec: LanguageModelFields, local: GroupedQueryAttentionSpec) -> Iterator[Problem]:
    if local.window is None and spec.local_layers is None:
        yield Problem("missing", "local_attention.window", None, "is required", "add it, or omit local_attention")
    if (window := getattr(spec.attention, "window", None)) is not None and spec.local_layers is None:
        rule = "conflicts with local_attention, which all layers with a window have"
        yield Problem("conflict", "attention.window", window, rule, "omit one of them")
    if spec.linear_attention is not None:
        rule = "cannot be used together with linear_attention"
        yield Problem("conflict", "local_attention", None, rule, "omit one of them")


def _layers_beyond_the_last(spec: LanguageModelFields) -> Iterator[Problem]:
    layer_lists = [(name, getattr(spec, name) or ()) for name in _LAYER_LISTS]
    for name in ("attention", "local_attention"):
        layers_with_window = getattr(getattr(spec, name), "windowed_layers", ())
        if isinstance(layers_with_window, tuple):
            layer_lists.append((f"{name}.windowed_layers", layers_with_window))
    for path, layers in layer_lists:
        if beyond := [layer for layer in layers if layer >= spec.num_layers]:
            rule = f"must be below num_layers (={spec.num_layers})"
            yield Problem("out_of_range", path, beyond[0], rule, "count layers from 0")
