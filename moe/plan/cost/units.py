"""A model as the planner sees it: the units that a pipeline stage has whole, with their parameters and dimensions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import assert_never

from moe.plan.placement import Weight, weights_of
from moe.plan.profile import Axes, Profile
from moe.spec import LanguageModelSpec, ModelSpec, MoESpec, TranslationModelSpec
from moe.spec.language import GroupedQueryAttentionSpec, LatentAttentionSpec, LinearAttentionSpec
from moe.spec.parameter import Block


@dataclass(frozen=True)
class AttentionDims:
    """What an attention costs, by its widths summed over heads."""

    queries: int
    keys: int
    """As the heads see them."""
    values: int
    kept_keys_and_values: int
    """As they are projected and kept: fewer where heads share them."""
    projections: int
    """Weights that each position is multiplied by."""
    latent: int = 0
    """Widths of latents and of what else is kept beside, which tensor ranks do not split."""
    window: int | None = None
    """Positions that a query looks back at most."""
    causal: bool = True
    rotated: int = 0
    """Widths of queries and keys that are kept once more, turned by their positions."""
    linear: int = 0
    """Width of a head's values where a state of fixed size stands for keys and values: positions then cost the same at
    any length."""


@dataclass(frozen=True)
class FeedForwardDims:
    """A feed-forward layer without experts."""

    hidden: int
    num_matrices: int


@dataclass(frozen=True, eq=False)
class Unit:
    """What a pipeline stage has whole. Alike units are one object."""

    kind: str
    """In words: `embeddings`, `encoder layer with experts`, `head`."""
    weights: tuple[Weight, ...]
    sides: int = 1
    """Runs of positions that the batch's positions are shared among: each passes through one of two stacks in an
    encoder-decoder."""
    attentions: tuple[AttentionDims, ...] = ()
    feed_forward: FeedForwardDims | None = None
    moe: MoESpec | None = None
    vocabulary: int | None = None
    """Logits of each position, where it is the head."""
    tied: tuple[Weight, ...] = ()
    """Of another unit: where that is on another stage, it has a copy of its own."""

    @property
    def is_layer(self) -> bool:
        return bool(self.attentions)


@lru_cache(64)
def apart(unit: Unit) -> Unit:
    """The unit on a stage that has nothing of the units that its weights are tied to."""
    return replace(unit, weights=(*unit.weights, *unit.tied), tied=()) if unit.tied else unit


@lru_cache(64)
def units(model: ModelSpec, profile: Profile) -> tuple[Unit, ...]:
    """All units of a model, in the order in which it uses them: embeddings, layers, head."""
    found: list[Unit] = []
    made: dict[Block, Unit] = {}
    for layer, (_, block) in enumerate(model.blocks(), -1):  # embeddings come first
        if block not in made:
            match model:
                case TranslationModelSpec():
                    made[block] = _of_translation(model, block, layer, profile.axes)
                case LanguageModelSpec():
                    made[block] = _of_language(model, block, layer, profile.axes)
                case _:
                    assert_never(model)
        found.append(made[block])
    return tuple(found)


def _of_translation(model: TranslationModelSpec, block: Block, layer: int, axes: Axes) -> Unit:
    unit = _unit(block, axes, model.sides)
    if layer < 0:
        return unit()
    if layer == model.num_layers:
        return unit(vocabulary=model.target_vocab_size)
    decodes, inner = layer >= model.num_encoder_layers, model.num_heads * model.head_dim
    attentions = tuple(
        AttentionDims(inner, inner, inner, 2 * inner, 4 * model.model_dim * inner, causal=causal)
        for causal in ((True, False) if decodes else (False,))
    )
    if layer in model.moe_layers:
        return unit(attentions=attentions, moe=model.moe)
    return unit(attentions=attentions, feed_forward=FeedForwardDims(model.ffn_dim_of(layer), 2))


def _of_language(model: LanguageModelSpec, block: Block, layer: int, axes: Axes) -> Unit:
    unit = _unit(block, axes, model.sides)
    if layer < 0:
        return unit()
    if layer == model.num_layers:
        return unit(vocabulary=model.vocab_size)
    matrices = (
        each for each in block.parameters if each.name.startswith("attention.") and len(each.shape) == 2
    )
    projections = sum(each.numel for each in matrices)
    if not model.has_full_attention(layer):
        assert model.linear_attention is not None
        dims = _linear_attention(model.linear_attention, projections)
    elif isinstance(model.attention, LatentAttentionSpec):
        dims = _latent_attention(model.attention, projections)
    else:
        dims = _grouped_query(model.attention, projections, model.window_of(layer))
    if layer in model.moe_layers:
        return unit(attentions=(dims,), moe=model.moe)
    assert model.ffn_dim is not None
    return unit(attentions=(dims,), feed_forward=FeedForwardDims(model.ffn_dim, model.num_ffn_matrices))


def _unit(block: Block, axes: Axes, sides: int) -> Callable[..., Unit]:
    """A unit of the block's parameters, given what else it is of."""
    weights, tied = weights_of(block.parameters, axes), weights_of(block.tied, axes)
    return partial(Unit, block.kind, weights, sides, tied=tied)


def _grouped_query(
    attention: GroupedQueryAttentionSpec, projections: int, window: int | None
) -> AttentionDims:
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    kept = 2 * keys + (queries if attention.output_gate else 0)
    return AttentionDims(queries, queries, queries, kept, projections, window=window, rotated=queries + keys)


def _latent_attention(attention: LatentAttentionSpec, projections: int) -> AttentionDims:
    heads, ranks = attention.num_heads, (attention.query_rank or 0) + attention.key_value_rank
    queries, values = heads * (attention.head_dim + attention.rope_dim), heads * attention.value_dim
    kept_latent = 2 * ranks + attention.rope_dim  # before and after their norms
    return AttentionDims(queries, queries, values, queries + values, projections, kept_latent)


def _linear_attention(attention: LinearAttentionSpec, projections: int) -> AttentionDims:
    keys, heads = attention.num_key_heads * attention.key_dim, attention.num_value_heads
    values = heads * attention.value_dim
    kept = 2 * (keys + values)  # before the convolution and after it, with the gate
    projections -= (2 * keys + values) * attention.conv_tokens  # the convolution is none
    return AttentionDims(
        2 * keys, heads * attention.key_dim, values, kept, projections, linear=attention.value_dim
    )
