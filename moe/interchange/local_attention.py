"""Config keys of models whose layers with a sliding window have an attention of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.family import Field, Fields
from moe.interchange.layer_types import FULL, SLIDING, Windows
from moe.interchange.reading import Reading
from moe.interchange.rope import Rope, longest, with_notation_of
from moe.spec import LanguageModelSpec
from moe.spec.language import RopeSpec

_PARAMETERS = "rope_parameters"


@dataclass(frozen=True)
class LocalAttention(Field):
    """`local_attention`, and RoPE of both types of layers."""

    windows: Windows
    fields: tuple[Field, ...]
    """Fields of `attention` that layers with a window have too, or have instead."""
    rope: Rope
    """RoPE of layers without a window."""
    local_rope: Rope
    """RoPE of layers with a window."""
    local_base_key: str | None
    """Key of the base of layers with a window in older configs; None if there are none, with one RoPE for all."""
    has_scaling_key: bool = True
    """Whether `rope_scaling` updates RoPE of layers without a window."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.windows.keys, *self._attention_keys, *self._rope_keys)

    @property
    def _attention_keys(self) -> tuple[str, ...]:
        return tuple(key for field in self.fields for key in field.keys)

    @property
    def _rope_keys(self) -> tuple[str, ...]:
        if self.local_base_key is None:
            return _PARAMETERS, "max_position_embeddings"
        keys = (_PARAMETERS, "rope_theta", self.local_base_key, "partial_rotary_factor", "max_position_embeddings")
        return (*keys, "rope_scaling") if self.has_scaling_key else keys

    def keys_of(self, spec_path: str) -> tuple[str, ...]:
        if spec_path.endswith(".rope"):
            return self._rope_keys
        return self.windows.keys if "window" in spec_path else self._attention_keys

    def read(self, config: Reading) -> Fields:
        by_type = self._parameters(config)
        scaling = {"rope_scaling": config.raw("rope_scaling")} if self.has_scaling_key else {}
        full_scaling = {**scaling, f"{_PARAMETERS}.{FULL}": by_type.get(FULL)}
        rope = {"attention.rope": _rope_of(config, self.rope, full_scaling, self.local_base_key and "rope_theta")}
        values = self.windows.read(config)
        if values["attention.window"] is None:
            return rope
        for field in self.fields:
            values |= field.read(config)
        sliding_scaling = {f"{_PARAMETERS}.{SLIDING}": by_type.get(SLIDING)}
        values["attention.rope"] = _rope_of(config, self.local_rope, sliding_scaling, self.local_base_key)
        return {**rope, **{f"local_{path}": value for path, value in values.items()}}

    def _parameters(self, config: Reading) -> Mapping[str, Any]:
        """`rope_parameters`, by layer type."""
        by_type = config.raw(_PARAMETERS)
        if by_type is None:
            return {}
        if not isinstance(by_type, dict) or not by_type.keys() <= {FULL, SLIDING}:
            rule = f"must be an object of {FULL} and {SLIDING}"
            config.refuse(_PARAMETERS, None, rule, "correct config.json", code="invalid_value")
            return {}
        return by_type

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        keys, local_rope = self.windows.write(spec), RopeSpec(base=self.local_rope.base)
        if spec.local_attention is not None:
            local_rope = spec.local_attention.rope
            for field in self.fields:
                keys |= field.write(spec.model_copy(update={"attention": spec.local_attention}))
        parameters = {
            FULL: self.rope.parameters_of(spec.attention.rope), SLIDING: self.local_rope.parameters_of(local_rope)
        }  # fmt: skip
        keys |= {_PARAMETERS: parameters, "max_position_embeddings": longest(spec.attention.rope)}
        return keys | self._older_keys(parameters)

    def _older_keys(self, parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Keys in which transformers 4 and vLLM expect `parameters`."""
        if self.local_base_key is None:
            return {}
        top_level_keys = {"rope_theta", "partial_rotary_factor"}
        scaling = {key: value for key, value in parameters[FULL].items() if key not in top_level_keys}
        keys = {key: parameters[FULL][key] for key in sorted(top_level_keys & parameters[FULL].keys())}
        keys[self.local_base_key] = parameters[SLIDING]["rope_theta"]
        if self.has_scaling_key:
            keys["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        return keys

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        parameters, by_type = self.write(spec)[_PARAMETERS], config.get(_PARAMETERS) or {}
        original = None if config.get("rope_scaling") else by_type.get(FULL)
        keys = self._older_keys({**parameters, FULL: with_notation_of(original, parameters[FULL])})
        return {key: value for key, value in keys.items() if config.get(key) is None}


@dataclass(frozen=True)
class RotaryWindows(Field):
    """Windows, and RoPE, which only layers with a window have (K-EXAONE)."""

    windows: Windows
    rope: Rope
    fields: tuple[Field, ...]
    """Fields of the attention of all layers."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.windows.keys, *self.rope.keys)

    def read(self, config: Reading) -> Fields:
        windows, rope = self.windows.read(config), self.rope.read(config)
        if config.get("sliding_window", int) is None:  # transformers refuses null
            return {}
        values: Fields = {"attention.rope": {"fraction": 0.0}}
        if windows["attention.window"] is not None:
            for local in (windows, rope, *(field.read(config) for field in self.fields)):
                values |= {f"local_{path}": value for path, value in local.items()}
        return values

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {**self.windows.write(spec), **self.rope.write(_with_local_rope(spec))}

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        return self.rope.older(_with_local_rope(spec), config)


def _with_local_rope(spec: LanguageModelSpec) -> LanguageModelSpec:
    """The model with the rotary positions of its layers with a window in every layer."""
    local = spec.local_attention
    return spec if local is None else spec.model_copy(update={"attention": local})


def _rope_of(config: Reading, rope: Rope, entries: Mapping[str, Any], base_key: str | None) -> dict[str, Any]:
    """RoPE fields of the config's `entries`, by name; keys in the first ones take precedence."""
    place, parameters = _PARAMETERS, dict[str, Any]()
    for key, entry in entries.items():
        if entry is not None and not isinstance(entry, dict):
            config.refuse(key, entry, "must be an object", "correct config.json", code="wrong_type")
        elif entry:
            if entry.get("truncate", True) is not True:
                rule = "has no effect in transformers under a layer type"
                config.refuse(f"{key}.truncate", entry["truncate"], rule, "remove it", code="not_applicable")
            place, parameters = key, {**entry, **parameters}
    return rope.rope_of(config, place, parameters, None if base_key is None else config.raw(base_key))


@dataclass(frozen=True)
class QueryScalar(Field):
    """`query_pre_attn_scalar`: the factor of attention scores to the power of -2 (Gemma)."""

    keys = ("query_pre_attn_scalar",)

    def read(self, config: Reading) -> Fields:
        scalar = config.get("query_pre_attn_scalar", float)
        if scalar is not None and scalar <= 0:
            config.refuse("query_pre_attn_scalar", scalar, "must be above 0", code="out_of_range")
            return {}
        return {"attention.scale": None if scalar is None else scalar**-0.5}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        scalar = spec.attention.score_scale**-2
        return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-9 * scalar else scalar}
