"""MiMo-V2-Flash: windows in five layers of six, with attention sinks and heads of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.families.decoder import ATTENTION, DECODER, DENSE, FUSED, STACK, experts, router, selection_bias
from moe.interchange.families.deepseek_v3 import MTP_KEYS, SIGMOID
from moe.interchange.family import Family, Field, Fields, TensorRow, in_layers
from moe.interchange.fields import DenseLayers, ExpertGroups, Heads, Key, Optional, Switch, always, value
from moe.interchange.layer_types import FULL, SLIDING, Windows
from moe.interchange.local_attention import LocalAttention
from moe.interchange.reading import Reading, json_equal
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec

_WINDOW = 129
"""Default of `sliding_window`."""


@dataclass(frozen=True)
class _ValueDim(Field):
    """Head dimension of values."""

    keys = ("v_head_dim",)

    def read(self, config: Reading) -> Fields:
        return {"attention.value_dim": config.get("v_head_dim", int)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        attention = spec.attention
        return {"v_head_dim": getattr(attention, "value_head_dim", attention.head_dim)}


@dataclass(frozen=True)
class _LocalHeads(Field):
    """Layers with a window have twice the key-value heads."""

    keys = ("num_key_value_heads",)

    def read(self, config: Reading) -> Fields:
        heads = config.get("num_key_value_heads", int)
        return {} if heads is None else {"attention.num_kv_heads": 2 * heads}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {"num_key_value_heads": (value(spec, "attention.num_kv_heads") or 0) // 2}


@dataclass(frozen=True)
class RedundantKeys(Field):
    """Keys of the published config that other keys determine; transformers ignores them, vLLM reads them."""

    keys = (
        "hybrid_layer_pattern", "moe_layer_freq", "swa_num_attention_heads", "swa_num_key_value_heads",
        "swa_head_dim", "swa_v_head_dim", "layernorm_epsilon",
    )  # fmt: skip

    def read(self, config: Reading) -> Fields:
        number, heads = config.get("num_hidden_layers", int) or 0, config.raw("num_key_value_heads")
        types, mlp_types = config.raw("layer_types"), config.raw("mlp_layer_types")
        if not isinstance(mlp_types, list):
            mlp_types = ["dense", *["sparse"] * (number - 1)]
        if not isinstance(types, list):
            types = [FULL if layer == 0 or not (layer + 1) % 6 else SLIDING for layer in range(number)]
        expected = {
            "hybrid_layer_pattern": [int(layer_type == SLIDING) for layer_type in types],
            "moe_layer_freq": [int(mlp_type == "sparse") for mlp_type in mlp_types],
            "swa_num_attention_heads": config.raw("num_attention_heads"),
            "swa_num_key_value_heads": 2 * heads if isinstance(heads, int) else None,
            "swa_head_dim": config.raw("head_dim"), "swa_v_head_dim": config.raw("v_head_dim"),
            "layernorm_epsilon": config.raw("rms_norm_eps"),
        }  # fmt: skip
        for key, key_value in expected.items():
            if config.has(key) and not json_equal(config.raw(key), key_value):
                rule = f"must be {key_value!r}, as other keys determine"
                config.refuse(key, config.raw(key), rule, "correct config.json", code="mismatch")
        return {}

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        layers, attention = range(spec.num_layers), spec.attention
        if not isinstance(attention, GroupedQueryAttentionSpec):
            return {}
        keys = {
            "hybrid_layer_pattern": [int(spec.window_of(layer) is not None) for layer in layers],
            "moe_layer_freq": [int(layer in spec.moe_layers) for layer in layers],
            "swa_num_attention_heads": attention.num_heads, "swa_num_key_value_heads": 2 * attention.num_kv_heads,
            "swa_head_dim": attention.head_dim, "swa_v_head_dim": attention.value_head_dim,
            "layernorm_epsilon": spec.norm_eps,
        }  # fmt: skip
        return {key: key_value for key, key_value in keys.items() if config.get(key) is None}


_ATTENTION = (
    Heads(head_dim=192),
    _ValueDim(),
    Optional("attention_value_scale", "attention.value_multiplier"),
    Switch("attention_bias", ("attention.bias",)),  # the output projection has none
)

MIMO_V2_FLASH = Family(
    model_types=("mimo_v2_flash",),
    architecture="MiMoV2FlashForCausalLM",
    defaults={
        "vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False, "attention_value_scale": 0.707, "sliding_window": _WINDOW,
        "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_routed_experts": 256,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    fields=(
        *DECODER,
        *_ATTENTION,
        LocalAttention(
            windows=Windows(
                selection="types", default="after_first", previous_key="sliding_window_size", unused_window=_WINDOW
            ),
            fields=(*_ATTENTION, _LocalHeads(), always(attention__sinks=True)),
            rope=Rope(base=5e6, fraction=0.334),
            local_rope=Rope(base=1e4, fraction=0.334),
            local_base_key="swa_rope_theta",
            has_scaling_key=False,
        ),
        RedundantKeys(),
        DenseLayers(fixed_first=1),
        Key("n_routed_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        ExpertGroups(),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        Optional("routed_scaling_factor", "moe.routed_scaling_factor"),
        SIGMOID,
    ),
    only={
        "add_swa_attention_sink_bias": (True,), "add_full_attention_sink_bias": (False,),
        "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
        "n_shared_experts": (0,), "use_qk_norm": (False,), "rope_scaling": (),
    },
    unused_keys={
        "attention_chunk_size": "the window says the same", "hybrid_block_size": "layer_types says the same",
        **MTP_KEYS,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=(
        *STACK,
        *ATTENTION,
        *in_layers(TensorRow("attention.sinks", "self_attn.attention_sink_bias")),
        *DENSE,
        *router("mlp.gate.weight"),
        *selection_bias("mlp.gate.e_score_correction_bias"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    fused_tensors=(*in_layers(TensorRow("attention.sinks", "self_attn.sinks")), *FUSED),
    mtp_pattern="model.mtp.",
    constant_keys={
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
)  # fmt: skip
