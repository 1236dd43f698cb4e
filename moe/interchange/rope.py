"""RoPE settings in `config.json`: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moe.interchange.family import Field, Fields
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec, ProblemCode
from moe.spec.language import RopeSpec
from moe.spec.rope import DynamicScaling, LongRopeScaling

_SCALED = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_tokens",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_tokens",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
    "longrope": {
        "original_max_position_embeddings": "original_tokens",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        "short_mscale": "short_mscale",
        "long_mscale": "long_mscale",
    },
}
"""Our field for each config key, by kind of scaling."""
_REQUIRED = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
             "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
             "longrope": ("short_factor", "long_factor", "short_mscale", "long_mscale")}  # fmt: skip
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LENGTH = {"original_max_position_embeddings"}
_PICTURE_POSITIONS = {"mrope_section", "mrope_interleaved"}
"""Division of the frequencies among a picture's three coordinates, which are equal for text."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""Keys of RoPE parameters; the first takes precedence."""
ORIGINAL = "original_max_position_embeddings"
_PROPORTIONAL = "proportional"
_TYPE = "position_embedding_type"
DEFAULT_MAX_TOKENS = 4096
"""`max_position_embeddings` of a new config if the spec does not determine it."""


@dataclass(frozen=True)
class Rope(Field):
    """RoPE of a family: defaults of the base, and of the fraction of a head's dimensions that rotate."""

    base: float = 10_000.0
    fraction: float | None = None
    """None: all dimensions rotate; other fractions are not supported."""
    dim_key: str | None = None
    """Key with the number of rotated dimensions, instead of a fraction (MiniMax-M2)."""
    pairing: Literal["half", "interleaved", "key"] = "half"
    """`key`: determined by the key `rope_interleave` (DeepSeek-V3)."""
    has_picture_positions: bool = False
    """Whether models of the family with pictures have positions of three coordinates (MRoPE)."""
    default: tuple[tuple[str, Any], ...] = ()
    """Default of `rope_parameters`."""
    yarn_names: tuple[str, ...] = ()
    """Further names of YaRN."""
    may_be_proportional: bool = False
    """Whether RoPE may be of the whole head in proportion (Gemma 4)."""
    scaled: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn")
    """Kinds of scaling of the family."""
    has_type_key: bool = False
    """Whether there is no rotary embedding unless `position_embedding_type` is `rope` (Granite 4)."""

    @property
    def keys(self) -> tuple[str, ...]:
        pairing_keys = ("rope_interleave",) if self.pairing == "key" else ()
        dim = () if self.dim_key is None else (self.dim_key,)
        type_keys = (_TYPE,) if self.has_type_key else ()
        return ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", ORIGINAL,
                "max_position_embeddings", *dim, *pairing_keys, *type_keys)  # fmt: skip

    def read(self, config: Reading) -> Fields:
        if self.has_type_key:
            config.only(_TYPE, ("rope", "nope"))
            if config.raw(_TYPE) != "rope":
                return {"attention.rope": {"fraction": 0.0}}
        path, parameters = self.parameters(config)
        if self.has_picture_positions:
            parameters = {key: value for key, value in parameters.items() if key not in _PICTURE_POSITIONS}
        return {"attention.rope": self.rope_of(config, path, parameters, config.raw("rope_theta"))}

    def rope_of(self, config: Reading, path: str, parameters: dict[str, Any], base: Any) -> dict[str, Any]:
        """RoPE fields of `parameters`, which are at `path` of the config; `base` if they have none."""
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        kind = "yarn" if kind in self.yarn_names else kind
        base = parameters.get("rope_theta", base)
        rope: dict[str, Any] = {"base": self.base if base is None else base}
        if kind == _PROPORTIONAL and self.may_be_proportional:
            return {**rope, **self._proportional(config, path, parameters)}
        rope["fraction"] = self._fraction(config, parameters)
        rope["pairing"] = self._pairing(config)
        if kind != "default":
            rope["scaling"] = self._scaling(config, path, str(kind), parameters)
        elif unused_keys := sorted(parameters.keys() - _COMMON_KEYS - _LENGTH - {"factor"}):
            rule = "has no effect without a rope_type"
            config.refuse(f"{path}.{unused_keys[0]}", parameters[unused_keys[0]], rule, code="not_applicable")
        return {key: value for key, value in rope.items() if value is not None}

    def _proportional(self, config: Reading, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
        rope: dict[str, Any] = {"proportional": True, "pairing": self._pairing(config)}
        fraction = replace(self, fraction=1.0)._fraction(config, parameters)
        if unknown_keys := sorted(parameters.keys() - _COMMON_KEYS - {"factor"}):
            rule = f"is not a key of the rope_type {_PROPORTIONAL}"
            config.refuse(f"{path}.{unknown_keys[0]}", parameters[unknown_keys[0]], rule, code="unknown_key")
        if parameters.get("factor") not in (None, 1):
            rope["scaling"] = {"kind": "linear", "factor": parameters["factor"]}
        return rope if fraction is None else {**rope, "fraction": fraction}

    def parameters(self, config: Reading) -> tuple[str, dict[str, Any]]:
        """(key, its RoPE parameters)."""
        for key in ROPE_KEYS:
            parameters = config.raw(key)
            if parameters is None or (parameters == {} and key == "rope_scaling"):
                continue
            if not isinstance(parameters, dict):
                config.refuse(key, parameters, "must be an object", code="wrong_type")
                return key, {}
            if layer_kinds := [name for name, value in parameters.items() if isinstance(value, dict)]:
                config.refuse(
                    f"{key}.{layer_kinds[0]}",
                    None,
                    "has different RoPE settings per layer type, which is not supported",
                )
                return key, {}
            return key, dict(parameters)
        return "rope_parameters", dict(self.default)

    def _fraction(self, config: Reading, parameters: dict[str, Any]) -> float | None:
        fraction = parameters.get("partial_rotary_factor", config.raw("partial_rotary_factor"))
        if fraction is None and self.dim_key is not None and config.has(self.dim_key):
            rotary_dim = config.get(self.dim_key, int)
            head = config.get("head_dim", int)
            if rotary_dim is None or head is None:
                return None
            if not 0 < rotary_dim <= head:
                rule = f"must be from 1 to head_dim (={head})"
                config.refuse(self.dim_key, rotary_dim, rule, "correct config.json", code="out_of_range")
                return None
            return rotary_dim / head
        if self.fraction is None and fraction not in (None, 1):
            config.refuse("partial_rotary_factor", fraction, "must be 1: models of this type rotate all channels")
            return None
        if fraction is None:
            return self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            code: ProblemCode = "out_of_range" if type(fraction) in (int, float) else "wrong_type"
            rule = "must be a number above 0 and at most 1"
            config.refuse("partial_rotary_factor", fraction, rule, "correct config.json", code=code)
            return None
        return float(fraction)

    def _pairing(self, config: Reading) -> str | None:
        if self.pairing != "key":
            return self.pairing
        return "interleaved" if config.get("rope_interleave", bool, null=False) else "half"

    def _scaling(self, config: Reading, path: str, kind: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
        if kind not in self.scaled:
            rule = f"must be default, {', '.join(self.scaled)}; no other is supported"
            config.refuse(f"{path}.rope_type", kind, rule)
            return None
        field_by_key = _SCALED[kind]
        for key in sorted(parameters.keys() - field_by_key.keys() - _COMMON_KEYS - _LENGTH):
            if parameters[key] is not None:
                rule = f"is not a key of the rope_type {kind}"
                config.refuse(f"{path}.{key}", parameters[key], rule, code="unknown_key")
        for key in _REQUIRED[kind]:
            if parameters.get(key) is None:
                rule = f"is required by the rope_type {kind}"
                config.refuse(f"{path}.{key}", None, rule, "add it to config.json", code="missing")
        scaling = {field: parameters[key] for key, field in field_by_key.items() if parameters.get(key) is not None}
        if "truncate" in field_by_key and parameters.get("truncate", True) is None:
            scaling["truncate"] = False  # null is false, not the default, as in transformers
        for zero in ("mscale", "mscale_all_dim"):  # zero means the same as None
            if scaling.get(zero) == 0:
                del scaling[zero]
        if kind == "dynamic":
            scaling["original_tokens"] = config.get("max_position_embeddings", int)
        elif kind != "linear":
            # A top-level key takes precedence over one in the parameters; the default is the longest position.
            original = config.raw(ORIGINAL) or parameters.get(ORIGINAL) or config.get("max_position_embeddings", int)
            scaling["original_tokens"] = original
        return {"kind": kind, **scaling}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        rope = spec.attention.rope
        parameters, keys = self.parameters_of(rope), dict[str, Any]()
        if self.pairing == "key":
            keys["rope_interleave"] = rope.pairing == "interleaved"
        if self.has_type_key:
            keys[_TYPE] = "rope" if rope.fraction else "nope"
        keys |= {"rope_parameters": parameters, "max_position_embeddings": longest(rope)}
        return keys | self._older_keys(spec, parameters)

    def parameters_of(self, rope: RopeSpec) -> dict[str, Any]:
        """`rope_parameters`."""
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
        if rope.scaling is not None:
            scaling = rope.scaling.model_dump(mode="json")
            parameters["rope_type"] = rope.scaling.kind
            for key, field in _SCALED[rope.scaling.kind].items():
                if scaling[field] is not None:
                    parameters[key] = scaling[field]
        if rope.proportional and self.may_be_proportional:
            parameters["rope_type"] = _PROPORTIONAL
        if self.fraction is not None or self.dim_key is not None or parameters["rope_type"] == _PROPORTIONAL:
            parameters["partial_rotary_factor"] = rope.fraction
        return parameters

    def _older_keys(self, spec: LanguageModelSpec, parameters: dict[str, Any]) -> dict[str, Any]:
        """Keys in which transformers 4 and vLLM expect `parameters`. `rope_scaling` is null, not omitted, without
        scaling: GPT-OSS has a default of its own. Models with pictures require their positions there."""
        top_level_keys = {"rope_theta", "partial_rotary_factor"}
        scaling = {key: value for key, value in parameters.items() if key not in top_level_keys}
        keys = {key: parameters[key] for key in sorted(top_level_keys) if key in parameters}
        keys["rope_scaling"] = scaling if parameters["rope_type"] != "default" or picture_positions(scaling) else None
        if self.dim_key is not None:
            keys[self.dim_key] = spec.attention.rope.rotated_dim(spec.attention.head_dim)
        return keys

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        new_parameters = self.write(spec)["rope_parameters"]
        original_parameters = config.get("rope_parameters") if not config.get("rope_scaling") else None
        keys = self._older_keys(spec, with_notation_of(original_parameters, new_parameters))
        if config.get("rope_scaling") and config.get(ORIGINAL) is None:  # transformers 4 ignores the top-level key
            del keys["rope_scaling"]
        return {key: value for key, value in keys.items() if key == "rope_scaling" or config.get(key) is None}


def picture_positions(parameters: Any) -> dict[str, Any]:
    """Keys of RoPE parameters that only positions of pictures depend on."""
    return {key: value for key, value in (parameters or {}).items() if key in _PICTURE_POSITIONS}


def with_notation_of(original: Mapping[str, Any] | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """`parameters` with the optional keys of the `original` config's, if it has any, which mean the same."""
    if not original:
        return parameters
    always = {"rope_type", "rope_theta", "partial_rotary_factor", ORIGINAL}
    return {**original, **{key: parameters[key] for key in always & parameters.keys()}}


def longest(rope: RopeSpec) -> int:
    """`max_position_embeddings` of a new config."""
    scaling = rope.scaling
    if scaling is None or not hasattr(scaling, "original_tokens"):
        return DEFAULT_MAX_TOKENS
    if isinstance(scaling, DynamicScaling | LongRopeScaling):
        return scaling.original_tokens
    return int(scaling.original_tokens * scaling.factor)
