"""ERNIE 4.5 with experts: interleaved rotary positions, and a bias that selects among the probabilities of experts."""

from dataclasses import dataclass
from typing import Any

from moe.interchange.families.decoder import (
    ATTENTION,
    AUXILIARY,
    DECODER,
    DENSE,
    FULL_LAYERS,
    FUSED,
    STACK,
    experts,
    router,
    shared_experts,
)
from moe.interchange.families.deepseek_v3 import MTP_KEYS
from moe.interchange.family import Family, Field, Fields, in_layers, part
from moe.interchange.fields import Heads, Key, SharedExpertCount, always
from moe.interchange.reading import Reading
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec

_FIRST, _LAST, _INTERVAL = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


@dataclass(frozen=True)
class ExpertInterval(Field):
    """Layers with experts: every `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index` (-1: the
    last)."""

    keys = (_FIRST, _LAST, _INTERVAL, "intermediate_size")

    def read(self, config: Reading) -> Fields:
        first, last, interval, layers = (
            config.get(key, int) for key in (_FIRST, _LAST, _INTERVAL, "num_hidden_layers")
        )
        if first is None or last is None or interval is None or layers is None:
            return {}
        if interval < 1:
            config.refuse(_INTERVAL, interval, "must be at least 1", code="out_of_range")
            return {}
        last = layers - 1 if last == -1 else last
        sparse = {layer for layer in range(layers) if first <= layer <= last and (layer + 1) % interval == 0}
        dense = [layer for layer in range(layers) if layer not in sparse]
        if not sparse:
            config.refuse(_FIRST, first, "leaves no layer with experts: a model without experts has another model_type")
        is_first = dense == list(range(len(dense)))
        fields: Fields = {"first_dense_layers": len(dense)} if is_first else {"dense_layers": dense}
        return {**fields, "ffn_dim": config.get("intermediate_size", int)} if dense else fields

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        layers = spec.moe_layers or (spec.num_layers,)
        interval = layers[1] - layers[0] if len(layers) > 1 else 1
        if (layers[0] + 1) % interval:  # reading back shows what this cannot express
            interval = 1
        return {_FIRST: layers[0], _LAST: layers[-1], _INTERVAL: interval,
                "intermediate_size": spec.ffn_dim or spec.model_dim}  # fmt: skip


_BIAS = "feed_forward.moe.router_bias"

ERNIE4_5_MOE = Family(
    model_types=("ernie4_5_moe",),
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        "vocab_size": 103_424, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28,
        "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, _FIRST: 1, _LAST: -1, _INTERVAL: 1,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(),
        Rope(base=5e5, pairing="interleaved"),
        ExpertInterval(),
        SharedExpertCount("moe_num_shared_experts", smallest=0),
        Key("moe_num_experts", "moe.num_experts"),
        Key("moe_k", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        always(
            moe__router="softmax_topk", moe__renormalize_gates=True, moe__activation="swiglu", moe__selection_bias=True,
        ),
        *AUXILIARY,
    ),
    only={
        "use_bias": (False,), "moe_norm_min": (1e-12,), "use_rmsnorm": (True,), "moe_gate": ("topk",),
        "moe_use_aux_free": (True,),
    },
    unused_keys={**MTP_KEYS, "moe_capacity": "experts have no capacity here but moe.capacity_factor"},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    tensors=(
        *STACK,
        *ATTENTION,
        *DENSE,
        *router("mlp.gate.weight"),
        *in_layers(part(_BIAS, "e", "mlp.moe_statics.e_score_correction_bias", "1 e")),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_experts"),
    ),
    fused_tensors=(*in_layers(part(_BIAS, "e", "mlp.gate.moe_statics.e_score_correction_bias", "1 e")), *FUSED),
    mtp_pattern="model.mtp_",
)  # fmt: skip
