"""Presets: a laptop-sized model, the GShard family (arXiv 2006.16668, Tables 1 to 3), and other published models.

A translation preset `name` has a dense twin `name-dense`: feed-forward layers as wide as a token's K experts replace
layers with experts, at equal FLOPs per token.
"""

from collections.abc import Mapping
from typing import Any

from moe.spec.errors import spec_error
from moe.spec.moe import MoESpec
from moe.spec.published import PUBLISHED
from moe.spec.routers import for_router

# Trained for a few minutes, so that most pairs are seen at most once: dropout would only slow it down.
_TINY: dict[str, Any] = {
    "model_dim": 128, "num_heads": 4, "head_dim": 32, "ffn_dim": 512,
    "num_encoder_layers": 2, "num_decoder_layers": 2,
    "source_vocab_size": 4096, "target_vocab_size": 4096, "share_vocabulary": True, "dropout": 0.0,
    "moe": {"num_experts": 8, "hidden_dim": 512, "capacity_factor": 4.0, "aux_coefficient": 0.05,
            "group_tokens": 512},
}  # fmt: skip


def _paper(num_experts: int, num_layers: int) -> dict[str, Any]:
    """Fields of a GShard model; `num_layers` counts encoder and decoder layers together."""
    return {
        "model_dim": 1024, "num_heads": 16, "head_dim": 128, "ffn_dim": 8192,
        "num_encoder_layers": num_layers // 2, "num_decoder_layers": num_layers // 2,
        "source_vocab_size": 64_000, "target_vocab_size": 32_000, "share_vocabulary": False, "dropout": 0.1,
        "moe": {"num_experts": num_experts, "hidden_dim": 8192, "capacity_factor": 2.0,
                "aux_coefficient": 0.01, "group_tokens": 2048},
    }  # fmt: skip


_MODELS: dict[str, dict[str, Any]] = {
    "gshard-tiny": _TINY,
    **{
        f"gshard-{experts}e-{layers}l": _paper(experts, layers)
        for experts, layers in ((128, 12), (128, 36), (512, 12), (512, 36), (2048, 12), (2048, 36), (2048, 60))
    },
    **PUBLISHED,
}


def _dense_twin(sparse: dict[str, Any]) -> dict[str, Any]:
    moe = MoESpec(model_dim=sparse["model_dim"], **sparse["moe"])
    dense = {key: value for key, value in sparse.items() if key != "moe"}
    return {**dense, "dense_twin_ffn_dim": moe.experts_per_token * moe.hidden_dim}


def names() -> list[str]:
    """Names of all presets, each translation preset with its dense twin."""
    return [twin for name in _MODELS for twin in ((name, f"{name}-dense") if _has_twin(name) else (name,))]


def _has_twin(name: str) -> bool:
    return name in _MODELS and _MODELS[name].get("kind") != "language"


def dimensions(name: Any) -> dict[str, Any]:
    """Fields of a preset. Raises SpecError for an unknown name."""
    if isinstance(name, str) and name in _MODELS:
        return dict(_MODELS[name])
    if isinstance(name, str) and name.endswith("-dense") and _has_twin(name.removesuffix("-dense")):
        return _dense_twin(_MODELS[name.removesuffix("-dense")])
    raise spec_error("not_a_choice", "preset", name, "is not a preset", f"use one of {', '.join(names())}")


def merge_overrides(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `overrides` into a base; `moe`, each kind of attention and its indexer field by field."""
    fields = dict(overrides)
    for part in ("moe", "attention", "local_attention", "linear_attention", "indexer"):
        if isinstance(base.get(part), dict) and isinstance(overrides.get(part), dict):
            defaults = for_router(overrides[part].get("router"), base[part]) if part == "moe" else base[part]
            fields[part] = merge_overrides(defaults, overrides[part])
    return {**base, **fields}


def expand_preset(model: Any) -> Any:
    """Fill in a model's preset, and `model_dim` of its experts."""
    if not isinstance(model, dict):
        return model
    fields = dict(model)
    if (name := model.get("preset")) is not None:
        fields = merge_overrides(dimensions(name), model)
    moe = fields.get("moe")
    if isinstance(moe, dict) and "model_dim" in fields:
        fields["moe"] = {"model_dim": fields["model_dim"], **moe}
    return fields
