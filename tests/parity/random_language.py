"""Language models at random, of any part that a family may have, with layouts that divide them."""

from typing import Any

from hypothesis import strategies as st

from moe.spec import LanguageModelSpec, MoESpec, SpecError
from tests.parity.combinations import ROUTERS
from tests.parity.language_models import VOCABULARY, with_adapter
from tests.parity.trajectory import Degrees

LAYOUTS = (
    Degrees(micro_batch_groups=1), Degrees(micro_batch_groups=2, recompute="full"),
    Degrees(data=2, fsdp=2, expert_fsdp=2), Degrees(expert=2, micro_batch_groups=1, num_chunks=2),
    Degrees(expert=2, tensor=2, recompute="selective"), Degrees(expert=2, tensor=2, micro_batch_groups=2),
    Degrees(expert_tensor=2, tensor=2), Degrees(expert=2, fsdp=2, max_rows=9),
    Degrees(expert=2, data=2, tensor=2, fsdp=2, expert_fsdp=2, recompute="full", micro_batch_groups=1),
    Degrees(expert=2, expert_tensor=2, tensor=4),
    Degrees(expert=4, ranks_per_node=2, tensor=2, fsdp=2, num_chunks=3),
    Degrees(expert=2, context=2, micro_batch_groups=1, recompute="full"), Degrees(data=4, context=4, fsdp=2),
    Degrees(expert=2, data=2, context=2, tensor=2, fsdp=2, num_chunks=2),
)  # fmt: skip
FREEZES: tuple[tuple[str, ...], ...] = (
    (), ("embedding.*",), ("*.moe.router",), ("*attention*",), ("*.experts.*", "norm.weight"), ("layers.0.*",),
    ("*norm*", "output.*"),
)  # fmt: skip
"""Patterns of frozen parameters; some match nothing in some models."""

TARGETS: tuple[list[str] | None, ...] = (
    None, ["*.experts.*"], ["*.attention.*", "*.router"], ["*.experts.w_out"], ["layers.0.*"], ["*.dense.*"],
    ["*.shared.*"],
)  # fmt: skip
"""Patterns of matrices with adapters; some match nothing in some models."""

_maybe = st.booleans()
_FEW_LAYERS = st.integers(1, 3)


@st.composite
def language_models(
    draw: st.DrawFn, degrees: Degrees, layer_counts: st.SearchStrategy[int] = _FEW_LAYERS
) -> LanguageModelSpec:
    """Models of a few layers, each perhaps with experts."""
    num_layers = draw(layer_counts)
    router = dict(draw(st.sampled_from(list(ROUTERS.values()))))
    if "num_expert_groups" not in router and draw(_maybe):
        router["num_experts"] = 12
    per_rank = st.integers(1, 6)
    has_experts = draw(st.integers(0, 9)) > 0
    fields: dict[str, Any] = {
        "model_dim": 4 * draw(st.integers(1, 5)), "num_layers": num_layers,
        "ffn_dim": degrees.tensor * draw(per_rank),
        "ffn_activation": draw(st.sampled_from(["gelu", "relu2", "swiglu"])),
        "tie_embeddings": draw(_maybe), "norm_one_plus": draw(_maybe),
        "attention": draw(_attention(degrees.tensor, num_layers)),
        "norm_placement": draw(st.sampled_from(["pre", "post", "sandwich"])),
    }  # fmt: skip
    if num_layers > 1 and draw(_maybe):
        fields |= draw(_linear(degrees.tensor, num_layers, fields["model_dim"]))
    elif fields["attention"].get("window") is None and draw(_maybe):
        fields["local_attention"] = {**draw(_grouped_query(degrees.tensor)), **draw(_windows(num_layers))}
    if "linear_attention" in fields or "local_attention" in fields:  # the first layer may have no indexer to share
        fields["attention"].get("indexer", {}).pop("shared_layers", None)
    if num_layers > 1 and "indexer" not in fields["attention"] and draw(st.integers(0, 2)) == 0:
        layers = st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=num_layers - 1)
        fields["feed_forward_layers"] = sorted(draw(layers))
        if "attention_layers" in fields:
            fields["attention_layers"] = sorted({*fields["attention_layers"]} - {*fields["feed_forward_layers"]})
    if draw(_maybe):
        fields |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_divisor": 2.0}
    if not fields["norm_one_plus"]:
        fields["norm_kind"] = draw(st.sampled_from(["rms", "layer"]))
    fields |= {
        "output_bias": draw(_maybe),
        "normalize_output": draw(_maybe),
        "logits_cap": draw(st.sampled_from([None, 2.0])),
        "layer_scalar": draw(_maybe),
    }
    if has_experts:
        last = max(fields.get("feed_forward_layers", [num_layers - 1]))
        fields["first_dense_layers"] = draw(st.integers(0, last))
        hidden_dim = degrees.expert_tensor * draw(per_rank)
        fields["moe"] = MoESpec(**{
            "num_experts": 4, "group_tokens": 64, "model_dim": fields["model_dim"], "hidden_dim": hidden_dim,
            "latent_dim": draw(st.none() | per_rank), **router, "router_norm": draw(_maybe),
            "expert_scale": draw(_maybe),
        })  # fmt: skip
        if fields["norm_placement"] == "sandwich" and fields.get("norm_kind") == "rms":
            branches = {"branch_norms": draw(_maybe), "shared_hidden_dim": draw(per_rank)}
            fields["moe"] = MoESpec(**{**fields["moe"].model_dump(), **branches})
    spec = LanguageModelSpec(kind="language", vocab_size=VOCABULARY, **fields)
    return draw(_with_adapter(spec)) if draw(st.integers(0, 3)) == 0 else spec


@st.composite
def _with_adapter(draw: st.DrawFn, spec: LanguageModelSpec) -> LanguageModelSpec:
    """The same model with an adapter, of a rank and of targets that it can have."""
    ranks = [1, *(rank for rank in (2, 3) if _with(spec, {"rank": rank}) is not None)]
    adapter = {
        "rank": draw(st.sampled_from(ranks)), "alpha": draw(st.sampled_from([None, 0.7, 5.0])),
        "rank_stabilized": draw(_maybe), "targets": draw(st.sampled_from(TARGETS)),
        "dropout": draw(st.sampled_from([0.0, 0.4])),
    }  # fmt: skip
    return _with(spec, adapter) or _with(spec, {**adapter, "targets": None}) or spec


def _with(spec: LanguageModelSpec, adapter: dict[str, Any]) -> LanguageModelSpec | None:
    try:
        return with_adapter(spec, adapter)
    except SpecError:  # a target matches nothing in the model, or the rank is too large
        return None


_NORMALIZED = st.integers(2, 7)
"""Widths that are normalized: the norm of a single number is its sign, and magnifies rounding near zero."""


@st.composite
def _attention(draw: st.DrawFn, tensor: int, num_layers: int) -> dict[str, Any]:
    if draw(st.integers(0, 2)) == 0:
        latent = {
            "kind": "latent", "num_heads": tensor * draw(st.integers(1, 2)), "head_dim": draw(st.integers(1, 5)),
            "query_rank": draw(st.none() | _NORMALIZED), "key_value_rank": draw(_NORMALIZED),
            "rope_dim": 2 * draw(st.integers(1, 3)), "value_dim": draw(st.integers(1, 6)), "bias": draw(_maybe),
            "query_scaling": draw(st.sampled_from([None, {"coefficient": 0.5, "tokens": 3}])),
        }  # fmt: skip
        has_indexer = latent["query_rank"] is not None and draw(_maybe)
        return {**latent, "indexer": draw(_indexer(latent["rope_dim"], num_layers))} if has_indexer else latent
    return {**draw(_grouped_query(tensor)), **draw(st.just({}) | _windows(num_layers))}


@st.composite
def _indexer(draw: st.DrawFn, rope_dim: int, num_layers: int) -> dict[str, Any]:
    coefficient = draw(st.sampled_from([0.0, 0.5]))
    return {
        "num_heads": draw(st.integers(1, 3)), "head_dim": rope_dim + draw(st.integers(0, 3)),
        "top_k": draw(st.sampled_from([1, 3, 40])), "pairing": draw(st.sampled_from(["half", "interleaved"])),
        "shared_layers": sorted(draw(st.sets(st.integers(1, num_layers - 1)))) if num_layers > 1 else [],
        "loss_coefficient": coefficient,
        "stage": draw(st.sampled_from(["sparse", "dense"])) if coefficient else "sparse",
    }  # fmt: skip


@st.composite
def _grouped_query(draw: st.DrawFn, tensor: int) -> dict[str, Any]:
    kv_heads = tensor * draw(st.integers(1, 2))
    query_key_norm = draw(st.sampled_from([None, "head", "width", "unscaled"]))
    return {
        "kind": "grouped_query", "num_kv_heads": kv_heads, "num_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": 4 * draw(st.integers(1, 2)), "bias": draw(_maybe), "output_bias": draw(_maybe),
        "query_key_norm": query_key_norm, "norm_after_rope": query_key_norm in ("head", "unscaled") and draw(_maybe),
        "clip": draw(st.sampled_from([None, 0.7])),
        "scale": draw(st.sampled_from([None, 0.3])), "sinks": draw(_maybe),
        "query_scaling": draw(st.sampled_from([None, {"coefficient": 0.5, "tokens": 3, "first_position": 1}])),
        **draw(st.sampled_from([
            {}, {"output_gate": True}, {"value_dim": 3, "value_multiplier": 0.7}, {"keys_as_values": True},
        ])),
        "value_norm": draw(_maybe), "rope": draw(_rope()),
    }  # fmt: skip


@st.composite
def _rope(draw: st.DrawFn) -> dict[str, Any]:
    scaling, is_proportional = draw(st.sampled_from(_SCALINGS)), draw(_maybe)
    if is_proportional and scaling is not None and scaling["kind"] != "linear":
        scaling = None
    fraction = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return {"fraction": fraction, "scaling": scaling, "proportional": is_proportional}


def _windows(num_layers: int) -> st.SearchStrategy[dict[str, Any]]:
    layers = st.just("all") | st.sets(st.integers(0, num_layers - 1)).map(sorted)
    kind = st.sampled_from(["sliding", "chunk"])
    return st.fixed_dictionaries(
        {"window": st.integers(1, 5)}, optional={"windowed_layers": layers, "window_kind": kind}
    )


@st.composite
def _linear(draw: st.DrawFn, tensor: int, num_layers: int, model_dim: int) -> dict[str, Any]:
    """Linear attention in some layers."""
    key_heads = tensor * draw(st.integers(1, 2))
    kinds: list[dict[str, Any]] = [
        {
            "num_key_heads": key_heads, "num_value_heads": key_heads * draw(st.integers(1, 2)),
            "key_dim": draw(_NORMALIZED), "value_dim": draw(_NORMALIZED),
        },
        {
            "kind": "mamba2", "num_groups": key_heads, "num_heads": key_heads * draw(st.integers(1, 2)),
            "head_dim": draw(_NORMALIZED), "state_dim": draw(st.integers(1, 4)), "conv_bias": draw(_maybe),
            "bias": draw(_maybe), "min_time_step": draw(st.sampled_from([0.0, 0.1])),
        },
        *([{"kind": "short_convolution", "bias": draw(_maybe)}] if model_dim % tensor == 0 else []),
    ]  # fmt: skip
    linear = {**draw(st.sampled_from(kinds)), "conv_tokens": draw(st.integers(1, 4))}
    if draw(_maybe):
        return {"linear_attention": linear, "full_attention_every": draw(st.integers(2, 3))}
    layers = st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1)
    return {"linear_attention": linear, "attention_layers": sorted(draw(layers))}


_SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"kind": "linear", "factor": 4.0},
    {"kind": "llama3", "factor": 4.0, "original_tokens": 8},
    {"kind": "yarn", "factor": 4.0, "original_tokens": 8},
)
