"""Parts of the families' config tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe.interchange.family import Field, Fields
from moe.interchange.reading import Reading, json_equal
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def value(spec: LanguageModelSpec, path: str) -> Any:
    """A spec's field by its dotted path; None if a part of the path is None."""
    part: Any = spec
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


@dataclass(frozen=True)
class _OneKey(Field):
    config_key: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.config_key,)


@dataclass(frozen=True)
class Key(_OneKey):
    """A key for a spec field."""

    spec_path: str
    kind: type = int

    def read(self, config: Reading) -> Fields:
        return {self.spec_path: config.get(self.config_key, self.kind)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        field_value = value(spec, self.spec_path)
        is_number = field_value is not None and not isinstance(field_value, str)  # as `sqrt_model_dim` is not
        return {self.config_key: self.kind(field_value) if is_number else field_value}


@dataclass(frozen=True)
class Switch(_OneKey):
    """A boolean key for a field with two values."""

    spec_path: tuple[str, ...]
    true_value: Any = True
    false_value: Any = False

    def read(self, config: Reading) -> Fields:
        return dict.fromkeys(self.spec_path, self.true_value if config.get(self.config_key, bool) else self.false_value)

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: value(spec, self.spec_path[0]) == self.true_value}


@dataclass(frozen=True)
class SelectionBias(_OneKey):
    """A boolean key for whether experts have a bias that affects choices only."""

    def read(self, config: Reading) -> Fields:
        return {"moe.selection_bias": config.get(self.config_key, bool)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: spec.moe is not None and spec.moe.routing.has_selection_bias}


@dataclass(frozen=True)
class Optional(_OneKey):
    """A key that is null if the field is None."""

    spec_path: str
    kind: type = float
    null_value: Any = None
    """Value of the key if the field is None."""

    def read(self, config: Reading) -> Fields:
        key_value = config.get(self.config_key, self.kind, null=None)
        return {self.spec_path: None if key_value == self.null_value else key_value}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        field_value = value(spec, self.spec_path)
        return {self.config_key: self.null_value if field_value is None else self.kind(field_value)}


@dataclass(frozen=True)
class Always(Field):
    """Fields with one value in every model of the family."""

    fields: tuple[tuple[str, Any], ...]
    keys = ()

    def read(self, config: Reading) -> Fields:
        return dict(self.fields)


def always(**fields: Any) -> Always:
    """Fields by keyword; `moe__router="softmax_topk"` sets `moe.router`."""
    return Always(tuple((name.replace("__", "."), constant) for name, constant in fields.items()))


@dataclass(frozen=True)
class Heads(Field):
    """Numbers of query and key-value heads (equal if the latter is null), and head dimension."""

    head_dim: int | None = None
    """Default head dimension; None: model dimension over number of heads."""

    keys = ("num_attention_heads", "num_key_value_heads", "head_dim")

    def read(self, config: Reading) -> Fields:
        heads, width = config.get("num_attention_heads", int), config.get("hidden_size", int)
        num_kv_heads = config.get("num_key_value_heads", int, null=heads)
        dim = self.head_dim
        if config.has("head_dim"):
            dim = config.get("head_dim", int)
        elif dim is None and heads and width:
            dim = width // heads
        return {
            "attention.kind": "grouped_query",
            "attention.num_heads": heads,
            "attention.num_kv_heads": num_kv_heads,
            "attention.head_dim": dim,
        }

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        attention = spec.attention
        keys = {"num_attention_heads": attention.num_heads, "head_dim": attention.head_dim}
        if isinstance(attention, GroupedQueryAttentionSpec):
            keys["num_key_value_heads"] = attention.num_kv_heads
        return keys


@dataclass(frozen=True)
class Scale(_OneKey):
    """A key with the factor of attention scores, independent of the head dimension."""

    def read(self, config: Reading) -> Fields:
        return {"attention.scale": config.get(self.config_key, float)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: float(spec.attention.score_scale)}


_DENSE = "a model without experts has another model_type"


@dataclass(frozen=True)
class SparseSteps(Field):
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers` (Qwen)."""

    keys = ("decoder_sparse_step", "mlp_only_layers", "intermediate_size")

    def read(self, config: Reading) -> Fields:
        step = config.get("decoder_sparse_step", int)
        dense = config.raw("mlp_only_layers") or []
        layers = config.get("num_hidden_layers", int)
        if layers and isinstance(dense, list):  # ignore layers beyond the last, as transformers does
            dense = [layer for layer in dense if not (isinstance(layer, int) and layer >= layers)]
        fields: Fields = {"moe_every": step, "dense_layers": dense}
        if layers and step and isinstance(dense, list):
            with_experts = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
            if not with_experts:
                key, key_value = ("decoder_sparse_step", step) if step > layers else ("mlp_only_layers", dense)
                config.refuse(key, key_value, f"leaves no layer with experts: {_DENSE}")
            if len(with_experts) < layers:
                fields["ffn_dim"] = config.get("intermediate_size", int)
        return fields

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        dense = sorted(set(range(spec.num_layers)) - set(spec.moe_layers))
        keys: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        if spec.first_dense_layers == 0:
            keys = {"decoder_sparse_step": spec.moe_every, "mlp_only_layers": list(spec.dense_layers)}
        return {**keys, "intermediate_size": spec.ffn_dim or spec.model_dim}


@dataclass(frozen=True)
class FirstDense(Field):
    """The first layers have no experts; `config_key` is their number (DeepSeek)."""

    config_key: str = "first_k_dense_replace"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.config_key, "intermediate_size")

    def read(self, config: Reading) -> Fields:
        first = config.get(self.config_key, int, null=0)
        layers = config.get("num_hidden_layers", int)
        if first and layers and first >= layers:
            rule = f"must be below num_hidden_layers (={layers}): {_DENSE}"
            config.refuse(self.config_key, first, rule, code="out_of_range")
        fields: Fields = {"first_dense_layers": first}
        return {**fields, "ffn_dim": config.get("intermediate_size", int)} if first else fields

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        first = spec.moe_layers[0] if spec.moe_layers else spec.num_layers
        return {self.config_key: first, "intermediate_size": spec.ffn_dim or spec.model_dim}


@dataclass(frozen=True)
class DenseLayers(Field):
    """Layers without experts, which `mlp_layer_types` calls dense; without it, the first `first_k_dense_replace`."""

    fixed_first: int | None = None
    """Dense layers without `mlp_layer_types`, if transformers ignores `first_k_dense_replace`."""
    ignores_first: bool = False
    """Whether `first_k_dense_replace` may differ from `mlp_layer_types`, which transformers then follows."""

    keys = ("mlp_layer_types", "first_k_dense_replace", "intermediate_size")

    def read(self, config: Reading) -> Fields:
        layers = config.get("num_hidden_layers", int) or 0
        dense = self._listed(config, layers) if config.has("mlp_layer_types") else self._first(config, layers)
        if layers and len(dense) == layers:
            config.refuse("mlp_layer_types", None, f"leaves no layer with experts: {_DENSE}")
        is_first = dense == list(range(len(dense)))
        fields: Fields = {"first_dense_layers": len(dense)} if is_first else {"dense_layers": dense}
        return {**fields, "ffn_dim": config.get("intermediate_size", int)} if dense else fields

    def _listed(self, config: Reading, layers: int) -> list[int]:
        types = config.raw("mlp_layer_types")
        if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {"dense", "sparse"}:
            config.refuse("mlp_layer_types", None, f"must be {layers} of dense and sparse", code="invalid_value")
            return []
        dense = [layer for layer, layer_type in enumerate(types) if layer_type == "dense"]
        if config.has("first_k_dense_replace") and not self.ignores_first:
            first = config.get("first_k_dense_replace", int)
            if first is not None and dense != list(range(first)):
                rule = "differs from the dense layers of mlp_layer_types"
                config.refuse("first_k_dense_replace", first, rule, "remove it", code="conflict")
        return dense

    def _first(self, config: Reading, layers: int) -> list[int]:
        first = config.get("first_k_dense_replace", int, null=self.fixed_first) or 0
        if self.fixed_first is not None and first != self.fixed_first:
            rule = f"must be {self.fixed_first}: transformers ignores it for this model_type"
            config.refuse("first_k_dense_replace", first, rule, "write mlp_layer_types instead")
        return list(range(min(first, layers)))

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        types = ["sparse" if layer in spec.moe_layers else "dense" for layer in range(spec.num_layers)]
        first = types.index("sparse") if "sparse" in types else spec.num_layers
        keys: dict[str, Any] = {"mlp_layer_types": types, "intermediate_size": spec.ffn_dim or spec.model_dim}
        if "dense" not in types[first:]:
            return {**keys, "first_k_dense_replace": first}
        return keys if self.ignores_first else {**keys, "first_k_dense_replace": None}


@dataclass(frozen=True)
class SharedExpertCount(Field):
    """Number of shared experts, each with the hidden dimension of a routed expert (DeepSeek)."""

    config_key: str = "n_shared_experts"
    smallest: int = 1

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.config_key,)

    def read(self, config: Reading) -> Fields:
        number, width = config.get(self.config_key, int), config.get("moe_intermediate_size", int)
        if number is not None and number < self.smallest:
            config.refuse(self.config_key, number, f"must be at least {self.smallest}", code="out_of_range")
        return {"moe.shared_hidden_dim": number * width if number and width else None}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        shared_dim, width = value(spec, "moe.shared_hidden_dim"), value(spec, "moe.hidden_dim")
        return {self.config_key: (shared_dim or 0) // width if width else 0}


@dataclass(frozen=True)
class Windows(Field):
    """Layers with a sliding window of `sliding_window` tokens."""

    selection: Literal["all", "types"]
    """`all`: all layers, if there is a window. `types`: layers with `sliding_attention` in `layer_types`."""
    default: Literal["even", "below", "from", "pattern", "after_first", ""] = ""
    """Without `layer_types`: even layers, even layers below `max_window_layers`, layers from `max_window_layers` on,
    all but every `sliding_window_pattern`-th, or all but the first and every sixth."""
    previous_key: str | None = None
    """Key with the number of previous tokens in the window, which takes precedence (MiMo-V2)."""
    has_switch: bool = False
    """Whether `use_sliding_window` must also be true."""

    @property
    def keys(self) -> tuple[str, ...]:
        keys = ["sliding_window"]
        keys += ["use_sliding_window"] if self.has_switch else []
        keys += ["max_window_layers"] if self.default in ("below", "from") else []
        keys += ["sliding_window_pattern"] if self.default == "pattern" else []
        keys += [] if self.previous_key is None else [self.previous_key]
        return (*keys, *(["layer_types"] if self.selection == "types" else []))

    def read(self, config: Reading) -> Fields:
        is_on = config.get("use_sliding_window", bool) if self.has_switch else True
        window = config.get("sliding_window", int, null=None) if is_on else None
        if self.previous_key is not None and config.has(self.previous_key):
            window = (config.get(self.previous_key, int) or 0) + 1
        if self.selection == "all":
            return {"attention.window": window, "attention.windowed_layers": "even" if window is None else "all"}
        layers = self._layers(config, is_on and window is not None)
        if layers and window is None:
            rule = f"has {SLIDING}, but no sliding_window is in use"
            config.refuse("layer_types", None, rule, "correct config.json", code="requires")
        number = config.get("num_hidden_layers", int) or 0
        short = {tuple(range(number)): "all", tuple(range(0, number, 2)): "even", (): "even"}
        layers_with_window = short.get(tuple(layers), layers)
        return {"attention.window": window if layers else None, "attention.windowed_layers": layers_with_window}

    def _layers(self, config: Reading, is_on: bool) -> list[int]:
        number = config.get("num_hidden_layers", int) or 0
        if config.has("layer_types"):
            return _of_type(config, number, SLIDING)
        if self.default == "even":
            return list(range(0, number, 2))
        if self.default == "pattern":
            period = config.get("sliding_window_pattern", int) or 1
            return [layer for layer in range(number) if (layer + 1) % period]
        if self.default == "after_first":
            return [layer for layer in range(1, number) if (layer + 1) % 6]
        if not is_on:
            return []
        first = config.get("max_window_layers", int)
        if first is None:
            return []
        layers = range(0, min(number, first), 2) if self.default == "below" else range(max(0, first), number)
        return list(layers)

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        window = next((layer_window for layer_window in windows if layer_window is not None), None)
        keys: dict[str, Any] = {"sliding_window": window}
        if self.previous_key is not None and window is not None:
            keys[self.previous_key] = window - 1
        if self.has_switch:
            keys["use_sliding_window"] = window is not None
        if self.selection == "types":
            keys["layer_types"] = [FULL if layer_window is None else SLIDING for layer_window in windows]
        return keys

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """Switch off a window that no layer uses: transformers 4 ignores `layer_types` of Qwen2-MoE and would apply the
        window to every layer."""
        is_used = any(spec.window_of(layer) is not None for layer in range(spec.num_layers))
        if is_used or not config.get("use_sliding_window"):
            return {}
        return {"use_sliding_window": False, "sliding_window": None}


@dataclass(frozen=True)
class LinearLayers(Field):
    """Every n-th layer has full attention, all others linear (Qwen3-Next)."""

    keys = ("layer_types", "full_attention_interval")

    def read(self, config: Reading) -> Fields:
        number = config.get("num_hidden_layers", int) or 0
        if not config.has("layer_types"):
            interval = config.get("full_attention_interval", int)
            if interval == 1:
                config.refuse("full_attention_interval", interval, "leaves no layer with linear attention")
            return {"full_attention_every": interval}
        full = set(range(number)) - set(_of_type(config, number, LINEAR))
        interval = min(full) + 1 if full else number + 1
        if full != set(range(interval - 1, number, interval)):
            config.refuse("layer_types", None, "must have full attention in every n-th layer and only there")
        elif interval == 1:
            config.refuse("layer_types", None, "leave no layer with linear attention")
        return {"full_attention_every": interval}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        full = [spec.has_full_attention(layer) for layer in range(spec.num_layers)]
        return {"layer_types": [FULL if is_full else LINEAR for is_full in full]}


@dataclass(frozen=True)
class AttentionLayers(Field):
    """`layer_types`, with full attention in some layers and linear attention, under one of several names, in the
    others."""

    linear_types: tuple[str, ...]
    """Names of layers with linear attention; the first is written."""
    full_types: tuple[str, ...] = (FULL,)
    """Names of layers with full attention; the first is written."""
    default: str | None = None
    """Type of all layers without `layer_types`, which are required if it is None."""

    keys = ("layer_types",)

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        return self.write(spec)  # transformers 4 knows only the first names

    def read(self, config: Reading) -> Fields:
        number, types = config.get("num_hidden_layers", int) or 0, config.raw("layer_types")
        if types is None and self.default is None:
            config.refuse("layer_types", None, "is required", "add it to config.json", code="missing")
            return {}
        types = [self.default] * number if types is None else types
        known_types = {*self.full_types, *self.linear_types}
        if not isinstance(types, list) or len(types) != number or not set(map(str, types)) <= known_types:
            rule = f"must be {number} of {' and '.join(sorted(known_types))}"
            config.refuse("layer_types", None, rule, code="invalid_value")
            return {}
        return {"attention_layers": [layer for layer, name in enumerate(types) if name in self.full_types]}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        layers = range(spec.num_layers)
        full, linear = self.full_types[0], self.linear_types[0]
        return {"layer_types": [full if spec.has_full_attention(layer) else linear for layer in layers]}


@dataclass(frozen=True)
class EveryLayer(_OneKey):
    """A list with one entry per layer, all of which must be this one."""

    entry: Any

    def read(self, config: Reading) -> Fields:
        entries = config.raw(self.config_key)
        if entries is not None and (
            not isinstance(entries, list) or any(not json_equal(entry, self.entry) for entry in entries)
        ):
            config.refuse(self.config_key, None, f"must be {self.entry!r} for every layer; nothing else is supported")
        return {}


def _of_type(config: Reading, number: int, kind: str) -> list[int]:
    types = config.raw("layer_types")
    known_types = {FULL, SLIDING} if kind == SLIDING else {FULL, LINEAR}
    if not isinstance(types, list) or len(types) != number or not set(map(str, types)) <= known_types:
        rule = f"must be {number} of {' and '.join(sorted(known_types))}"
        config.refuse("layer_types", None, rule, code="invalid_value")
        return []
    return [layer for layer, layer_type in enumerate(types) if layer_type == kind]


@dataclass(frozen=True)
class ExpertGroups(Field):
    """Number of expert groups, and of groups per token (DeepSeek); null means 1."""

    method: bool = False
    """Whether `topk_method` determines if groups are used (DeepSeek-V2)."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("n_group", "topk_group", *(["topk_method"] if self.method else []))

    def read(self, config: Reading) -> Fields:
        if self.method:
            config.only("topk_method", ("greedy", "group_limited_greedy"))
            if config.raw("topk_method") in ("greedy", None):
                return {"moe.num_expert_groups": 1, "moe.expert_groups_per_token": 1}
        return {
            "moe.num_expert_groups": config.get("n_group", int, null=1),
            "moe.expert_groups_per_token": config.get("topk_group", int, null=1),
        }

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        groups = value(spec, "moe.num_expert_groups") or 1
        keys = {"n_group": groups, "topk_group": value(spec, "moe.expert_groups_per_token") or 1}
        return {**keys, "topk_method": "group_limited_greedy" if groups > 1 else "greedy"} if self.method else keys


@dataclass(frozen=True)
class WriteOnlyKey(_OneKey):
    """A key that is written but never read."""

    spec_path: str
    kind: type = float

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: self.kind(value(spec, self.spec_path) or 0)}
