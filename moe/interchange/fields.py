"""Parts of the families' config tables."""

from dataclasses import dataclass
from typing import Any

from moe.interchange.family import Field, Fields
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec


def value(spec: LanguageModelSpec, path: str) -> Any:
    """A spec's field by its dotted path; None if a part of the path is None."""
    part: Any = spec
    for name in path.split("."):
        part = getattr(part, name, None)
    return part


@dataclass(frozen=True)
class OneKey(Field):
    config_key: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.config_key,)


@dataclass(frozen=True)
class Key(OneKey):
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
class Switch(OneKey):
    """A boolean key for a field with two values."""

    spec_path: tuple[str, ...]
    true_value: Any = True
    false_value: Any = False

    def read(self, config: Reading) -> Fields:
        return dict.fromkeys(self.spec_path, self.true_value if config.get(self.config_key, bool) else self.false_value)

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: value(spec, self.spec_path[0]) == self.true_value}


@dataclass(frozen=True)
class SelectionBias(OneKey):
    """A boolean key for whether experts have a bias that affects choices only."""

    def read(self, config: Reading) -> Fields:
        return {"moe.selection_bias": config.get(self.config_key, bool)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: spec.moe is not None and spec.moe.routing.has_selection_bias}


@dataclass(frozen=True)
class Optional(OneKey):
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
class Scale(OneKey):
    """A key with the factor of attention scores, independent of the head dimension."""

    def read(self, config: Reading) -> Fields:
        return {"attention.scale": config.get(self.config_key, float)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: float(spec.attention.score_scale)}


_DENSE = "a model without experts has another model_type"


@dataclass(frozen=True)
class SparseSteps(Field):
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers` (Qwen)."""

    default_dense: tuple[int, ...] = ()
    """`mlp_only_layers`, if it is null."""

    keys = ("decoder_sparse_step", "mlp_only_layers", "intermediate_size")

    def read(self, config: Reading) -> Fields:
        step = config.get("decoder_sparse_step", int)
        dense = config.raw("mlp_only_layers")
        dense = list(self.default_dense) if dense is None else dense
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
        types = config.entries("mlp_layer_types", layers, ("dense", "sparse"))
        if types is None:
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
class WriteOnlyKey(OneKey):
    """A key that is written but never read."""

    spec_path: str
    kind: type = float

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: self.kind(value(spec, self.spec_path) or 0)}
