"""Gemma 4: experts beside a dense layer, each with norms of its own; heads of two widths; keys that are also values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.families.decoder import ATTENTION, DECODER, DENSE, SANDWICH_STACK, fused_experts, router
from moe.interchange.family import Family, Field, Fields, TensorRow, in_layers, transposed_row
from moe.interchange.fields import Heads, Key, Optional, Switch, always
from moe.interchange.layer_types import FULL, SLIDING, Windows
from moe.interchange.local_attention import LocalAttention
from moe.interchange.reading import Reading
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec

_PER_LAYER = "per_layer_config"
_GLOBAL_KEYS = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
"""Keys of layers without a window, each with the key of all layers."""
_WINDOWS = Windows(selection="types", default="five_of_six", unused_window=512)


def _types(config: Reading) -> list[Any]:
    """Types of layers; any may be invalid."""
    number, types = config.get("num_hidden_layers", int) or 0, config.raw("layer_types")
    if isinstance(types, list):
        return types
    return [SLIDING if (layer + 1) % 6 and layer < number - 1 else FULL for layer in range(number)]


@dataclass(frozen=True)
class _GlobalHeads(Field):
    """Heads of layers without a window, which transformers 5.24 writes as `per_layer_config`."""

    keys = (*_GLOBAL_KEYS, *_GLOBAL_KEYS.values(), "attention_k_eq_v", _PER_LAYER)

    def read(self, config: Reading) -> Fields:
        shares = config.get("attention_k_eq_v", bool) or False
        if config.raw(_PER_LAYER) is None:
            heads = self._by_type(config, shares=shares)
        else:
            heads = self._by_layer(config)
        return {
            "attention.head_dim": heads["head_dim"], "attention.num_kv_heads": heads["num_key_value_heads"],
            "attention.keys_as_values": shares,
        }  # fmt: skip

    @staticmethod
    def _by_type(config: Reading, *, shares: bool) -> dict[str, int | None]:
        num_kv_heads = config.get("num_key_value_heads", int)
        num_global = config.get("num_global_key_value_heads", int, null=num_kv_heads)
        if not shares and num_global != num_kv_heads:
            rule = "has no effect without attention_k_eq_v"
            config.refuse("num_global_key_value_heads", num_global, rule, "remove it", code="not_applicable")
        return {"head_dim": config.get("global_head_dim", int), "num_key_value_heads": num_global}

    @staticmethod
    def _by_layer(config: Reading) -> dict[str, int | None]:
        all_layers, overrides = {key: config.get(key, int) for key in _GLOBAL_KEYS.values()}, config.raw(_PER_LAYER)
        if not isinstance(overrides, dict) or not all(isinstance(own, dict) for own in overrides.values()):
            config.refuse(_PER_LAYER, None, "must be an object of layers", "correct config.json", code="wrong_type")
            return all_layers
        by_layer = {layer.lstrip("0") or "0": own for layer, own in overrides.items()}
        full_layers = [str(layer) for layer, kind in enumerate(_types(config)) if kind == FULL]
        by_full_layer = [{**all_layers, **by_layer.get(layer, {})} for layer in full_layers]
        heads = by_full_layer[0] if by_full_layer else all_layers
        is_uniform = all(own == heads for own in by_full_layer) and heads.keys() == all_layers.keys()
        if not is_uniform or not by_layer.keys() <= {*full_layers}:
            rule = f"must give all layers with {FULL} the same {' and '.join(all_layers)}, and nothing to others"
            config.refuse(_PER_LAYER, None, f"{rule}; nothing else is supported")
            return all_layers
        for global_key, key in _GLOBAL_KEYS.items():
            if config.has(global_key) and config.raw(global_key) != heads[key]:
                rule = f"differs from {_PER_LAYER} (={heads[key]})"
                config.refuse(global_key, config.raw(global_key), rule, "remove it", code="conflict")
        return heads

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        attention = spec.attention
        if not isinstance(attention, GroupedQueryAttentionSpec):
            return {}
        num_kv_heads = attention.num_kv_heads if attention.keys_as_values else None
        local = spec.local_attention or attention
        return {
            "global_head_dim": attention.head_dim, "head_dim": local.head_dim,
            "num_global_key_value_heads": num_kv_heads, "num_key_value_heads": local.num_kv_heads,
            "attention_k_eq_v": attention.keys_as_values,
        }  # fmt: skip

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keys instead of `per_layer_config`, which older releases of transformers 5 and vLLM do not know."""
        if config.get(_PER_LAYER) is None:
            return {}
        keys = self.write(spec)
        return {key: keys[key] for key in _GLOBAL_KEYS if config.get(key) is None}


@dataclass(frozen=True)
class _FeedForward(Field):
    """The dense layer, and experts beside it, if there are any."""

    experts: tuple[Field, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return ("enable_moe_block", "intermediate_size", *(key for field in self.experts for key in field.keys))

    def read(self, config: Reading) -> Fields:
        width = config.get("intermediate_size", int)
        if not config.get("enable_moe_block", bool):
            return {"ffn_dim": width, "ffn_activation": "geglu_tanh"}
        fields: Fields = {"moe.shared_hidden_dim": width}
        for field in self.experts:
            fields |= field.read(config)
        return fields

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        if spec.moe is None:
            return {"enable_moe_block": False, "intermediate_size": spec.ffn_dim}
        keys: dict[str, Any] = {"enable_moe_block": True, "intermediate_size": spec.moe.shared_hidden_dim}
        for field in self.experts:
            keys |= field.write(spec)
        return keys


@dataclass(frozen=True)
class _Unsupported(Field):
    """Features of the small dense models, and settings that transformers replaces or fails on."""

    keys = ("hidden_size_per_layer_input", "num_kv_shared_layers")

    def read(self, config: Reading) -> Fields:
        features = {"embeddings per layer": self.keys[0], "keys and values shared by layers": self.keys[1]}
        for feature, key in features.items():
            if key_value := config.get(key, int, null=0):
                config.refuse(key, key_value, f"must be 0: {feature} are not supported")
        types, parameters = _types(config), config.raw("rope_parameters")
        if types and types[-1] == SLIDING:
            rule = f"must end with {FULL}, to which transformers changes the last layer"
            config.refuse("layer_types", None, rule, "correct config.json", code="invalid_value")
        for kind in sorted({str(kind) for kind in types} & {FULL, SLIDING}) if isinstance(parameters, dict) else ():
            own = parameters.get(kind)
            if own is None or (isinstance(own, dict) and own.get("rope_theta") is None):
                path = f"rope_parameters.{kind}" if own is None else f"rope_parameters.{kind}.rope_theta"
                config.refuse(path, None, "is required", "add it to config.json", code="missing")
        return {}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return dict.fromkeys(self.keys, 0)


_ATTENTION = (
    Switch("attention_bias", ("attention.bias", "attention.output_bias")),
    always(attention__query_key_norm="head", attention__value_norm=True, attention__scale=1.0),
)
_EXPERTS = (
    Key("num_experts", "moe.num_experts"),
    Key("top_k_experts", "moe.top_k"),
    Key("moe_intermediate_size", "moe.hidden_dim"),
    always(
        moe__router="softmax_topk", moe__renormalize_gates=True, moe__activation="geglu_tanh", moe__router_norm=True,
        moe__expert_scale=True, moe__branch_norms=True, moe__aux_coefficient=0.0,
    ),
)  # fmt: skip

GEMMA4_TEXT = Family(
    model_types=("gemma4_text",),
    architecture="Gemma4ForCausalLM",
    defaults={
        "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": None, "attention_k_eq_v": False, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False, "sliding_window": 512,
        "final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0,
        "enable_moe_block": False, "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
    fields=(
        *DECODER,
        Heads(head_dim=256),
        _GlobalHeads(),
        *_ATTENTION,
        LocalAttention(
            windows=_WINDOWS,
            fields=(Heads(head_dim=256), *_ATTENTION),
            rope=Rope(base=1e6, may_be_proportional=True),
            local_rope=Rope(base=1e4, may_be_proportional=True),
            local_base_key=None,
            has_scaling_key=False,
        ),
        _FeedForward(_EXPERTS),
        Optional("final_logit_softcapping", "logits_cap"),
        _Unsupported(),
        always(norm_placement="sandwich", embedding_multiplier="sqrt_model_dim", layer_scalar=True),
    ),
    only={"use_bidirectional_attention": ("vision",), "hidden_act": ("gelu_pytorch_tanh",)},
    unused_keys={
        "use_double_wide_mlp": "only layers that share keys and values would be wider",
        "vocab_size_per_layer_input": "there are no embeddings per layer",
    },
    tensors=(
        *SANDWICH_STACK,
        *ATTENTION,
        *DENSE,
        *in_layers(
            TensorRow("scalar", "layer_scalar"),
            TensorRow("feed_forward.moe.shared_norm.weight", "pre_feedforward_layernorm.weight"),
            TensorRow("feed_forward.moe.shared_post_norm.weight", "post_feedforward_layernorm_1.weight"),
            TensorRow("feed_forward.moe.norm.weight", "pre_feedforward_layernorm_2.weight"),
            TensorRow("feed_forward.moe.post_norm.weight", "post_feedforward_layernorm_2.weight"),
            TensorRow("feed_forward.moe.router_scale", "router.scale"),
            TensorRow("feed_forward.moe.expert_scale", "router.per_expert_scale"),
            *(transposed_row(f"feed_forward.moe.shared.{name}", f"mlp.{word}_proj.weight")
              for name, word in (("w_gate", "gate"), ("w_in", "up"), ("w_out", "down"))),
        ),
        *router("router.proj.weight"),
        *fused_experts("experts.gate_up_proj", "experts.down_proj"),
    ),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
)  # fmt: skip
