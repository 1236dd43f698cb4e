"""Hunyuan-A13B: QK norm after the rotary embedding, and a shared expert."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe.interchange.families.decoder import (
    ATTENTION,
    DECODER,
    FULL_LAYERS,
    FUSED,
    STACK,
    experts,
    router,
    shared_experts,
)
from moe.interchange.family import Family, Field, Fields, TensorRow, in_layers
from moe.interchange.fields import Heads, Switch, always, value
from moe.interchange.reading import Reading, json_equal
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec


@dataclass(frozen=True)
class AlphaRope(Field):
    """RoPE whose dynamic scaling may have a constant `alpha`, which only raises the base."""

    rope: Rope

    @property
    def keys(self) -> tuple[str, ...]:
        return self.rope.keys

    def read(self, config: Reading) -> Fields:
        path, parameters = self.rope.parameters(config)
        base = parameters.get("rope_theta", config.raw("rope_theta")) or self.rope.base
        if not _has_alpha(parameters):
            return {"attention.rope": self.rope.rope_of(config, path, parameters, base)}
        alpha, dim = parameters["alpha"], Heads().read(config)["attention.head_dim"]
        if type(alpha) not in (int, float) or alpha <= 1 or type(base) not in (int, float) or dim is None or dim <= 2:
            rule = "must be a number above 1, with a head_dim above 2"
            config.refuse(f"{path}.alpha", alpha, rule, "correct config.json", code="out_of_range")
            return {}
        try:
            raised_base = float(base) * alpha ** (dim / (dim - 2))
        except OverflowError:
            raised_base = math.inf
        if not math.isfinite(raised_base):
            rule = f"must be a number that leaves the base (={base}) finite"
            config.refuse(f"{path}.alpha", alpha, rule, "correct config.json", code="out_of_range")
            return {}
        return {"attention.rope": self.rope.rope_of(config, path, {}, raised_base)}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return _with_alpha(self.rope.write(spec))

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not _has_alpha(parameters):
            return _with_alpha(self.rope.older(spec, config))
        scaling = {key: entry for key, entry in parameters.items() if key != "rope_theta"}
        return {"rope_scaling": scaling, "rope_theta": parameters.get("rope_theta") or config.get("rope_theta")}


def _with_alpha(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys whose dynamic scaling has an `alpha`, which transformers 4 requires."""
    scaling = keys.get("rope_scaling")
    return (
        {**keys, "rope_scaling": {"alpha": None, **scaling}} if scaling and scaling["rope_type"] == "dynamic" else keys
    )


def _has_alpha(parameters: Mapping[str, Any]) -> bool:
    return parameters.get("rope_type", parameters.get("type")) == "dynamic" and bool(parameters.get("alpha"))


@dataclass(frozen=True)
class SameInAllLayers(Field):
    """A whole number, or a list of as many equal ones as layers."""

    config_key: str
    spec_paths: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.config_key,)

    def read(self, config: Reading) -> Fields:
        entries = config.raw(self.config_key)
        if not isinstance(entries, list):
            return dict.fromkeys(self.spec_paths, config.get(self.config_key, int))
        if not entries or any(type(entry) is not int or entry != entries[0] for entry in entries):
            config.refuse(self.config_key, entries[:1], "must be the same whole number for every layer")
            return {}
        return dict.fromkeys(self.spec_paths, entries[0])

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {self.config_key: value(spec, self.spec_paths[0])}


@dataclass(frozen=True)
class RedundantWidth(Field):
    """`moe_intermediate_size`, of every layer, which must be `intermediate_size`."""

    keys = ("moe_intermediate_size",)

    def read(self, config: Reading) -> Fields:
        entries, width = config.raw("moe_intermediate_size"), config.raw("intermediate_size")
        entries = entries if isinstance(entries, list) else [width if entries is None else entries]
        if any(not json_equal(entry, width) for entry in entries):
            config.refuse("moe_intermediate_size", None, f"must be intermediate_size (={width})")
        return {}


_QK_NORMS = in_layers(
    TensorRow("attention.query_norm.weight", "self_attn.query_layernorm.weight"),
    TensorRow("attention.key_norm.weight", "self_attn.key_layernorm.weight"),
)

HUNYUAN_V1_MOE = Family(
    model_types=("hunyuan_v1_moe",),
    architecture="HunYuanMoEV1ForCausalLM",
    defaults={
        "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": False, "num_experts": 1, "moe_topk": 1,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        Heads(),
        AlphaRope(Rope()),
        Switch("attention_bias", ("attention.bias", "attention.output_bias")),
        SameInAllLayers("num_experts", ("moe.num_experts",)),
        SameInAllLayers("moe_topk", ("moe.top_k",)),
        SameInAllLayers("intermediate_size", ("moe.hidden_dim", "moe.shared_hidden_dim")),
        RedundantWidth(),
        always(
            attention__query_key_norm="head", attention__norm_after_rope=True, moe__router="softmax_topk",
            moe__renormalize_gates=True, moe__activation="swiglu", moe__aux_coefficient=0.0,
        ),
    ),
    only={
        "use_qk_norm": (True,), "use_cla": (False,), "use_mla": (False,), "use_mixed_mlp_moe": (True,),
        "use_rotary_pos_emb": (True,), "position_embedding_xdrope": (False,), "norm_type": ("rms",),
        "norm_topk_prob": (True,), "routed_scaling_factor": (1,), "group_limited_greedy": (False,),
        "moe_layer_num_skipped": (0,), "moe_drop_tokens": (False,), "moe_random_routing_dropped_token": (False,),
    },
    unused_keys={
        **dict.fromkeys(
            ("add_classification_head", "class_num", "pool_type", "skip_cls_token", "dense_list"),
            "there is no classifier",
        ),
        **dict.fromkeys(
            ("im_start_id", "im_end_id", "im_newline_id", "image_token_id", "num_media_embeds", "mask_init_id",
             "text_start_id", "text_end_id", "video_start_id", "video_end_id", "xdrope_section"),
            "it concerns pictures, which models of this type lack",
        ),
        "pad_id": "pad_token_id says the same",
        "org_vocab_size": "vocab_size says the same",
        "cla_share_factor": "layers share no keys and values",
        "num_shared_expert": "the shared expert's tensors say the same",
    },
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts", "attention_head_dim": "head_dim"},
    tensors=(
        *STACK,
        *(row for row in ATTENTION if not row.parameter_name.endswith("_norm.weight")),
        *_QK_NORMS,
        *router("mlp.gate.wg.weight"),
        *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_experts("mlp.shared_mlp"),
    ),
    fused_tensors=FUSED,
)  # fmt: skip
