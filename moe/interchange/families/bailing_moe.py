"""Ling 1 (arXiv 2503.05139): grouped-query attention with packed projections, shared experts, a normalized output."""

from dataclasses import dataclass
from typing import Any

from moe.interchange.families.bailing_moe_v2 import BAILING_MOE_V2
from moe.interchange.families.decoder import ATTENTION, DECODER, FULL_LAYERS, FUSED, STACK
from moe.interchange.families.sarvam_moe import SARVAM_MOE
from moe.interchange.family import Family, Field, Fields
from moe.interchange.fields import FirstDense, Heads, Key, SharedExpertCount, Switch, always, value
from moe.interchange.reading import Reading
from moe.interchange.rope import Rope
from moe.spec import LanguageModelSpec

_ARCHITECTURE = "BailingMoeForCausalLM"


@dataclass(frozen=True)
class LingVersion(Field):
    """The architecture, which tells Ling 1 from Ling 2.0 in configs whose `model_type` is that of both."""

    keys = ()

    def read(self, config: Reading) -> Fields:
        if (architectures := config.raw("architectures")) not in (None, [_ARCHITECTURE]):
            rule = f"must be [{_ARCHITECTURE}] or [{BAILING_MOE_V2.architecture}] if model_type is bailing_moe"
            config.refuse("architectures", architectures, rule)
        return {}


@dataclass(frozen=True)
class RenormalizedGates(Field):
    """`norm_topk_prob`, which has no effect on the gate of a single expert."""

    keys = ("norm_topk_prob",)

    def read(self, config: Reading) -> Fields:
        renormalizes = config.get("norm_topk_prob", bool)
        return {"moe.renormalize_gates": renormalizes and config.get("num_experts_per_tok", int) != 1}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {"norm_topk_prob": bool(value(spec, "moe.renormalize_gates"))}


BAILING_MOE = Family(
    model_types=("bailing_moe",),
    architecture=_ARCHITECTURE,
    defaults={
        "vocab_size": 30_592, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 16_384, "use_bias": True,
        "use_qkv_bias": False, "norm_head": False, "num_experts": 16, "num_shared_experts": 0,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "first_k_dense_replace": 0,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        LingVersion(),
        Heads(),
        Rope(),
        Switch("use_qkv_bias", ("attention.bias",)),
        Switch("norm_head", ("normalize_output",)),
        FirstDense(),
        SharedExpertCount("num_shared_experts", smallest=0),
        Key("num_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        RenormalizedGates(),
        always(moe__router="softmax_topk", moe__activation="swiglu", moe__aux_coefficient=0.0),
    ),
    # The published code adds a bias to the output projection of attention alone, vLLM also to feed-forward layers.
    only={"use_bias": (False,), "use_sliding_window": (False,), "norm_softmax": (False,)},
    unused_keys={
        "embedding_dropout": "the published code does not read it",
        "output_dropout": "the published code does not read it",
        "sliding_window": "no layer has a window",
        "max_window_layers": "no layer has a window",
    },
    aliases={"num_local_experts": "num_experts", "attention_bias": "use_qkv_bias"},
    tensors=SARVAM_MOE.tensors,
    fused_tensors=(STACK[0], *ATTENTION, *FUSED),
    is_in_transformers=False,
    constant_keys={"use_bias": False},
)  # fmt: skip
