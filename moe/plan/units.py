"""A model as the planner sees it: the units that a pipeline stage has whole, with their parameters and dimensions.

The model's modules say the same of their parameters when they make them; a test compares the two for every layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from moe.plan.weights import Weight
from moe.spec import LanguageModelSpec, ModelSpec, MoESpec, TranslationModelSpec
from moe.spec.language import GroupedQueryAttentionSpec, LatentAttentionSpec, LinearAttentionSpec


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
def units(model: ModelSpec) -> tuple[Unit, ...]:
    """All units of a model, in the order in which it uses them: embeddings, layers, head."""
    if isinstance(model, LanguageModelSpec):
        return tuple(_of_language(model))
    return tuple(_of_translation(model))


def _of_translation(model: TranslationModelSpec) -> Iterator[Unit]:
    width, num_encoders = model.model_dim, model.num_encoder_layers
    source = Weight("source_embedding", (model.source_vocab_size, width))
    yield Unit("embeddings", (source, _norm("encoder_norm", width)))

    @lru_cache(None)
    def layer(with_cross: bool, ffn_dim: int | None) -> Unit:
        weights = list(_attention(model, "attention", "norm"))
        if with_cross:
            weights += _attention(model, "cross_attention", "cross_norm")
        weights.append(_norm("feed_forward.norm", width))
        weights += _experts(model.moe) if ffn_dim is None else _feed_forward(model, ffn_dim)
        inner = model.num_heads * model.head_dim
        dims = [
            AttentionDims(inner, inner, inner, 2 * inner, 4 * width * inner, causal=with_cross and index == 0)
            for index in range(1 + with_cross)
        ]
        stack, what = "decoder" if with_cross else "encoder", "with experts" if ffn_dim is None else "without"
        return Unit(
            f"{stack} layer {what}" if model.moe else f"{stack} layer", tuple(weights), 2, tuple(dims),
            None if ffn_dim is None else FeedForwardDims(ffn_dim, 2), model.moe if ffn_dim is None else None,
        )  # fmt: skip

    with_experts = set(model.moe_layers)
    for index in range(model.num_layers):
        yield layer(index >= num_encoders, None if index in with_experts else model.ffn_dim_of(index))
    own = () if model.share_vocabulary else (Weight("target_embedding", (model.target_vocab_size, width)),)
    yield Unit(
        "head", (_norm("decoder_norm", width), *own), sides=2, vocabulary=model.target_vocab_size,
        tied=(source,) if model.share_vocabulary else (),
    )  # fmt: skip


def _of_language(model: LanguageModelSpec) -> Iterator[Unit]:
    width, with_experts = model.model_dim, set(model.moe_layers)
    embedding, output = (
        Weight(f"{name}.weight", (model.vocab_size, width), (("tensor", 0),))
        for name in ("embedding", "output")
    )
    yield Unit("embeddings", (embedding,))

    @lru_cache(None)
    def layer(experts: bool, full: bool, windowed: bool) -> Unit:
        if full:
            weights, dims = _full_attention(model, windowed)
        else:
            assert model.linear_attention is not None
            weights, dims = _linear_attention(model.linear_attention, width)
        weights = [_norm("norm", width), *weights, _norm("feed_forward.norm", width)]
        dense = None
        if experts:
            weights += _experts(model.moe)
        else:
            assert model.ffn_dim is not None
            dense = FeedForwardDims(model.ffn_dim, model.num_ffn_matrices)
            weights += [
                Weight(f"feed_forward.dense.{name}.weight", (model.ffn_dim, width), (("tensor", 0),))
                for name in ("w_in", "w_gate")[: dense.num_matrices - 1]
            ]
            weights.append(
                Weight("feed_forward.dense.w_out.weight", (width, model.ffn_dim), (("tensor", 1),))
            )
        kinds = [""] if full else ["linear attention"]
        kinds += ["sliding window"] if windowed else []
        kinds += ["with experts" if experts else "without experts"] if model.moe else []
        kind = "layer" + (" " + ", ".join(filter(None, kinds)) if any(kinds) else "")
        return Unit(kind, tuple(weights), 1, (dims,), dense, model.moe if experts else None)

    window = getattr(model.attention, "window", None)
    for index in range(model.num_layers):
        yield layer(
            index in with_experts, model.has_full_attention(index), window is not None and index % 2 == 0
        )
    own, tied = ((), (embedding,)) if model.tie_embeddings else ((output,), ())
    yield Unit("head", (_norm("norm", width), *own), vocabulary=model.vocab_size, tied=tied)


def _norm(name: str, width: int) -> Weight:
    return Weight(f"{name}.weight", (width,))


def _attention(model: TranslationModelSpec, name: str, norm: str) -> Iterator[Weight]:
    width, inner = model.model_dim, model.num_heads * model.head_dim
    yield _norm(norm, width)
    yield Weight(f"{name}.query.weight", (inner, width), (("tensor", 0),))
    yield Weight(f"{name}.key_value", (2, inner, width), (("tensor", 1),))
    yield Weight(f"{name}.output.weight", (width, inner), (("tensor", 1),))


def _feed_forward(model: TranslationModelSpec, ffn_dim: int) -> Iterator[Weight]:
    yield Weight("feed_forward.dense.w_in.weight", (ffn_dim, model.model_dim), (("tensor", 0),))
    yield Weight("feed_forward.dense.w_out.weight", (model.model_dim, ffn_dim), (("tensor", 1),))


def _full_attention(model: LanguageModelSpec, windowed: bool) -> tuple[list[Weight], AttentionDims]:
    if isinstance(model.attention, LatentAttentionSpec):
        return _latent_attention(model.attention, model.model_dim)
    return _grouped_query(model.attention, model.model_dim, windowed)


def _grouped_query(
    attention: GroupedQueryAttentionSpec, width: int, windowed: bool
) -> tuple[list[Weight], AttentionDims]:
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    split = (("tensor", 0),)
    weights = [
        Weight("attention.query.weight", (queries * (2 if attention.output_gate else 1), width), split),
        Weight("attention.key.weight", (keys, width), split),
        Weight("attention.value.weight", (keys, width), split),
        Weight("attention.output.weight", (width, queries), (("tensor", 1),)),
    ]
    if attention.bias:
        sizes = {"query": queries, "key": keys, "value": keys}
        weights += [Weight(f"attention.{name}.bias", (size,), split) for name, size in sizes.items()]
        weights.append(_norm("attention.output", width))
    if attention.query_key_norm:
        weights += [_norm(f"attention.{name}_norm", attention.head_dim) for name in ("query", "key")]
    if attention.sinks:
        weights.append(Weight("attention.sinks", (attention.num_heads,), split))
    projections = sum(weight.numel for weight in weights if len(weight.shape) == 2)
    kept = 2 * keys + (queries if attention.output_gate else 0)
    window = attention.window if windowed else None
    return weights, AttentionDims(
        queries, queries, queries, kept, projections, window=window, rotated=queries + keys
    )


def _latent_attention(attention: LatentAttentionSpec, width: int) -> tuple[list[Weight], AttentionDims]:
    heads, latent = attention.num_heads, attention.key_value_rank
    queries, values = heads * (attention.head_dim + attention.rope_dim), heads * attention.value_dim
    rank, split = attention.query_rank, (("tensor", 0),)
    if rank is None:
        weights = [Weight("attention.query.weight", (queries, width), split)]
    else:
        weights = [
            Weight("attention.query_down.weight", (rank, width)),
            _norm("attention.query_norm", rank),
            Weight("attention.query_up.weight", (queries, rank), split),
        ]
    from_latent = heads * (attention.head_dim + attention.value_dim)
    weights += [
        Weight("attention.key_value_down.weight", (latent + attention.rope_dim, width)),
        _norm("attention.key_value_norm", latent),
        Weight("attention.key_value_up.weight", (from_latent, latent), split),
        Weight("attention.output.weight", (width, values), (("tensor", 1),)),
    ]
    projections = sum(weight.numel for weight in weights if len(weight.shape) == 2)
    kept_latent = 2 * ((rank or 0) + latent) + attention.rope_dim  # before and after their norms
    return weights, AttentionDims(queries, queries, values, queries + values, projections, kept_latent)


def _linear_attention(attention: LinearAttentionSpec, width: int) -> tuple[list[Weight], AttentionDims]:
    keys, heads = attention.num_key_heads * attention.key_dim, attention.num_value_heads
    values, split = heads * attention.value_dim, (("tensor", 0),)
    weights = [
        Weight("attention.projection.weight", (2 * keys + 2 * values, width), split),
        Weight("attention.decays.weight", (2 * heads, width), split),
        Weight("attention.convolution.weight", (2 * keys + values, attention.conv_tokens), split),
        Weight("attention.decay", (heads,), split),
        Weight("attention.time_step", (heads,), split),
        _norm("attention.value_norm", attention.value_dim),
        Weight("attention.output.weight", (width, values), (("tensor", 1),)),
    ]
    projections = weights[0].numel + weights[1].numel + weights[-1].numel
    kept = 2 * (keys + values)  # before the convolution and after it, with the gate
    return weights, AttentionDims(
        2 * keys, heads * attention.key_dim, values, kept, projections, linear=attention.value_dim
    )


def _experts(moe: MoESpec | None) -> Iterator[Weight]:
    assert moe is not None
    width, hidden, shared = moe.model_dim, moe.hidden_dim, moe.shared_hidden_dim
    gated = moe.num_matrices == 3

    def of_experts(name: str, shape: tuple[int, ...], hidden_at: int) -> Weight:
        cuts = (("expert", 0), ("expert_tensor", hidden_at))
        return Weight(f"feed_forward.moe.experts.{name}", (moe.num_experts, *shape), cuts, of_experts=True)

    yield Weight("feed_forward.moe.router", (width, moe.num_experts))
    yield of_experts("w_in", (width, hidden), 2)
    if gated:
        yield of_experts("w_gate", (width, hidden), 2)
    yield of_experts("w_out", (hidden, width), 1)
    if moe.expert_bias:
        yield of_experts("b_in", (hidden,), 1)
        if gated:
            yield of_experts("b_gate", (hidden,), 1)
        yield of_experts("b_out", (width,), 1)
    if shared is not None:
        yield Weight("feed_forward.moe.shared.w_in", (width, shared))
        if gated:
            yield Weight("feed_forward.moe.shared.w_gate", (width, shared))
        yield Weight("feed_forward.moe.shared.w_out", (shared, width))
        if moe.shared_gate:
            yield Weight("feed_forward.moe.shared.gate", (width, 1))
