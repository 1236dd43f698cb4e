"""Llama 4: attention in chunks with rotary positions, every few layers attention to all tokens without positions, and
experts whose inputs are multiplied by the router's scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe.interchange.families.decoder import ATTENTION, DECODER, STACK, router, shared_experts
from moe.interchange.family import Family, Field, Fields, TensorRow, in_layers
from moe.interchange.fields import Heads, Switch, value
from moe.interchange.layer_types import FULL
from moe.interchange.reading import Reading
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec, RopeSpec

CHUNKED = "chunked_attention"
_TUNING = "attn_temperature_tuning"
_FLOOR_SCALE, _ATTN_SCALE = 8192, 0.1


@dataclass(frozen=True)
class InterleavedAttention(Field):
    """Layers with rotary positions and QK norm, and layers without either, whose queries are scaled by position; any of
    them in chunks."""

    fields: tuple[Field, ...]
    """Fields of all layers."""
    rope: Rope

    @property
    def keys(self) -> tuple[str, ...]:
        names = [key for field in (*self.fields, self.rope) for key in field.keys]
        return (*names, *_LAYER_KEYS, *_SCALING_KEYS, "use_qk_norm")

    def keys_of(self, spec_path: str) -> tuple[str, ...]:
        for word, keys in {".rope": self.rope.keys, "window": _LAYER_KEYS, "local_layers": _LAYER_KEYS,
                           "scaling": _SCALING_KEYS, "norm": ("use_qk_norm",)}.items():  # fmt: skip
            if word in spec_path:
                return keys
        return tuple(key for field in self.fields for key in field.keys)

    def read(self, config: Reading) -> Fields:
        number = config.get("num_hidden_layers", int) or 0
        rotary_layers = _rotary_layers(config, number)
        chunk = config.get("attention_chunk_size", int, null=None)
        chunked_layers = _chunked_layers(config, number, rotary_layers, chunk)
        common = {path: part for field in self.fields for path, part in field.read(config).items()}
        rotary, plain = {**common, **self._rotary(config)}, {**common, **_without_positions(config)}
        nope_layers = [layer for layer in range(number) if layer not in rotary_layers]
        if not rotary_layers or not nope_layers:
            return {**(rotary if rotary_layers else plain), **_chunks(chunk, chunked_layers, number)}
        local = {**rotary, **_chunks(chunk, [layer for layer in chunked_layers if layer in rotary_layers], number)}
        fields = {**plain, **{f"local_{path}": part for path, part in local.items()}}
        if chunked_layers != rotary_layers:
            fields |= {"local_layers": rotary_layers}
            fields |= _chunks(chunk, [layer for layer in chunked_layers if layer in nope_layers], number)
        return fields

    def _rotary(self, config: Reading) -> Fields:
        fields = self.rope.read(config)
        if config.get("use_qk_norm", bool):
            fields |= {"attention.query_key_norm": "unscaled", "attention.norm_after_rope": True}
        return fields

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        attentions = [spec.attention_of(layer) for layer in range(spec.num_layers)]
        windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
        grouped_query = [attention for attention in attentions if isinstance(attention, GroupedQueryAttentionSpec)]
        rotary = next((attention for attention in grouped_query if attention.rope.fraction), None)
        plain = next((attention for attention in grouped_query if not attention.rope.fraction), None)
        scaling = None if plain is None else plain.query_scaling
        keys: dict[str, Any] = {
            "attention_chunk_size": next((window for window in windows if window is not None), None),
            "layer_types": [FULL if window is None else CHUNKED for window in windows],
            "no_rope_layers": [int(attention is not None and attention is rotary) for attention in attentions],
            "use_qk_norm": rotary is None or rotary.query_key_norm == "unscaled",
            _TUNING: scaling is not None,
            "floor_scale": _FLOOR_SCALE if scaling is None else scaling.tokens,
            "attn_scale": _ATTN_SCALE if scaling is None else scaling.coefficient,
        }
        for field in self.fields:
            keys |= field.write(spec)
        return keys | self.rope.write(_with_rotary(spec, rotary))

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        rotary = next(filter(_is_rotary, (spec.local_attention, spec.attention)), None)
        keys = self.rope.older(_with_rotary(spec, rotary), config)
        # Published as the number 4, which transformers 5 refuses.
        return keys | ({_TUNING: bool(config[_TUNING])} if isinstance(config.get(_TUNING), int) else {})


_LAYER_KEYS = ("attention_chunk_size", "layer_types", "no_rope_layers", "no_rope_layer_interval")
_SCALING_KEYS = (_TUNING, "floor_scale", "attn_scale")


def _rotary_layers(config: Reading, number: int) -> list[int]:
    flags = config.raw("no_rope_layers")  # 1 for a layer with rotary positions, contrary to the name
    if not flags:
        interval = config.get("no_rope_layer_interval", int)
        if interval is not None and interval < 1:
            config.refuse("no_rope_layer_interval", interval, "must be at least 1", code="out_of_range")
        return [layer for layer in range(number) if (layer + 1) % max(1, interval or 1)]
    if not isinstance(flags, list) or len(flags) != number or any(flag not in (0, 1) for flag in flags):
        config.refuse("no_rope_layers", None, f"must be {number} of 0 and 1", code="invalid_value")
        return []
    return [layer for layer, flag in enumerate(flags) if flag]


def _chunked_layers(config: Reading, number: int, rotary_layers: list[int], chunk: int | None) -> list[int]:
    if config.raw("layer_types") is None:
        return [] if chunk is None else rotary_layers
    types = config.entries("layer_types", number, {FULL, CHUNKED}) or []
    layers = [layer for layer, name in enumerate(types) if name == CHUNKED]
    if layers and chunk is None:
        config.refuse("attention_chunk_size", None, f"is required by {CHUNKED}", "add it", code="missing")
    return layers


def _chunks(chunk: int | None, layers: Sequence[int], number: int) -> Fields:
    """Chunks of these layers."""
    if chunk is None or not layers:
        return {}
    return {
        "attention.window": chunk,
        "attention.window_kind": "chunk",
        "attention.windowed_layers": "all" if len(layers) == number else list(layers),
    }


def _without_positions(config: Reading) -> Fields:
    """Fields of layers without rotary positions."""
    fields: Fields = {"attention.rope": {"fraction": 0.0}}
    tuning = config.raw(_TUNING)
    if tuning is not None and not isinstance(tuning, int):
        config.refuse(_TUNING, tuning, "must be true or false", "correct config.json", code="wrong_type")
    coefficient, tokens = config.get("attn_scale", float), config.get("floor_scale", int)
    if not tuning or not coefficient:
        return fields
    return {**fields, "attention.query_scaling": {"coefficient": coefficient, "tokens": tokens, "first_position": 1}}


def _is_rotary(attention: Any) -> bool:
    return isinstance(attention, GroupedQueryAttentionSpec) and bool(attention.rope.fraction)


def _with_rotary(spec: LanguageModelSpec, rotary: Any) -> LanguageModelSpec:
    """The model with its rotary positions in every layer, or with default ones."""
    attention = rotary or spec.attention.model_copy(update={"rope": RopeSpec(base=_BASE)})
    return spec.model_copy(update={"attention": attention})


class ExpertLayers(Field):
    """Layers with experts and a shared expert, and dense layers of another width; or only dense layers."""

    keys = (
        "moe_layers", "interleave_moe_layer_step", "intermediate_size", "intermediate_size_mlp", "num_local_experts",
        "num_experts_per_tok", "router_aux_loss_coef",
    )  # fmt: skip

    def keys_of(self, spec_path: str) -> tuple[str, ...]:
        if not spec_path.startswith("moe."):
            return ("intermediate_size_mlp",) if spec_path == "ffn_dim" else self.keys[:2]
        by_field = {"num_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
        return (by_field.get(spec_path.removeprefix("moe."), "intermediate_size"),)

    def read(self, config: Reading) -> Fields:
        number = config.get("num_hidden_layers", int) or 0
        layers = _expert_layers(config, number)
        dense = [layer for layer in range(number) if layer not in layers]
        fields: Fields = {"ffn_dim": config.get("intermediate_size_mlp", int)} if dense else {}
        if not layers:
            return fields
        step = layers[0] + 1
        fields |= {"moe_every": step} if layers == list(range(layers[0], number, step)) else {"dense_layers": dense}
        hidden_dim = config.get("intermediate_size", int)
        return {
            **fields, "moe.num_experts": config.get("num_local_experts", int),
            "moe.top_k": config.get("num_experts_per_tok", int), "moe.hidden_dim": hidden_dim,
            "moe.shared_hidden_dim": hidden_dim, "moe.router": "sigmoid_topk", "moe.renormalize_gates": False,
            "moe.bias_update_rate": 0.0, "moe.aux_coefficient": 0.0, "moe.activation": "swiglu",
            "moe.apply_gates_to": "inputs",
        }  # fmt: skip

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        width, layers = spec.ffn_dim or spec.model_dim, list(spec.moe_layers)
        step = spec.moe_every if layers else 0
        keys = {"intermediate_size_mlp": width, "moe_layers": layers, "interleave_moe_layer_step": step}
        if spec.moe is None:
            return {**keys, "intermediate_size": width, "num_local_experts": 0, "num_experts_per_tok": 0}
        return {
            **keys, "intermediate_size": spec.moe.hidden_dim, "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "router_aux_loss_coef": float(value(spec, "moe.aux_coefficient") or 0),
        }  # fmt: skip


def _expert_layers(config: Reading, number: int) -> list[int]:
    layers = config.raw("moe_layers")
    if layers is None:
        step = config.get("interleave_moe_layer_step", int)
        if step is not None and step < 1:
            rule = "must be at least 1 without moe_layers"
            config.refuse("interleave_moe_layer_step", step, rule, code="out_of_range")
        return list(range((step or 1) - 1, number, max(1, step or 1)))
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        config.refuse("moe_layers", None, "must be a list of layers", "correct config.json", code="wrong_type")
        return []
    return sorted({layer for layer in layers if 0 <= layer < number})  # like transformers, ignore layers that are not


_BASE = 5e5

LLAMA4_TEXT = Family(
    model_types=("llama4_text",),
    architecture="Llama4ForCausalLM",
    defaults={
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        "no_rope_layer_interval": 4, "attention_chunk_size": 8192, _TUNING: True, "floor_scale": _FLOOR_SCALE,
        "attn_scale": _ATTN_SCALE, "attention_bias": False,
    },
    fields=(
        *DECODER,
        InterleavedAttention(
            (Heads(), Switch("attention_bias", ("attention.bias", "attention.output_bias"))),
            Rope(base=_BASE, pairing="interleaved"),
        ),
        ExpertLayers(),
    ),
    unused_keys={
        "for_llm_compressor": "another library's form of the experts",
        "router_aux_loss_coef": "transformers computes no such loss; moe.aux_coefficient sets this one's",
    },
    tensors=(
        *STACK,
        *ATTENTION,
        *router("feed_forward.router.weight"),
        *in_layers(
            # Inputs by outputs, also in memory.
            TensorRow("feed_forward.moe.experts.w_gate", "feed_forward.experts.gate_up_proj", "e m h", "e m (0/2 h)"),
            TensorRow("feed_forward.moe.experts.w_in", "feed_forward.experts.gate_up_proj", "e m h", "e m (1/2 h)"),
            TensorRow("feed_forward.moe.experts.w_out", "feed_forward.experts.down_proj", "e h m", "e h m"),
            *(
                TensorRow(f"feed_forward.dense.{parameter_name}.weight", f"feed_forward.{tensor_name}_proj.weight")
                for parameter_name, tensor_name in (("w_gate", "gate"), ("w_in", "up"), ("w_out", "down"))
            ),
        ),
        *shared_experts("feed_forward.shared_expert"),
    ),
    swaps_expert_factors=True,  # transformers' class of them does not say that they are stored transposed
)  # fmt: skip
