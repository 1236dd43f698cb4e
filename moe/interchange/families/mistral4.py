"""Mistral Small 4: DeepSeek's latent attention with queries scaled by position, and softmax routing."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from moe.interchange.families.decoder import DECODER, DENSE, FULL_LAYERS, FUSED, LATENT, STACK, router, shared_experts
from moe.interchange.families.deepseek_v2 import LATENT_KEYS, LATENT_UNUSED
from moe.interchange.family import Family, Field, Fields
from moe.interchange.fields import FirstDense, Key, SharedExpertCount, always, value
from moe.interchange.reading import Reading
from moe.interchange.rope import ORIGINAL, Rope
from moe.spec import LanguageModelSpec
from moe.spec.language import LatentAttentionSpec

BETA, FRACTION = "llama_4_scaling_beta", "partial_rotary_factor"
_ORIGINAL_TOKENS = 8192


@dataclass(frozen=True)
class QueryScalingRope(Field):
    """RoPE of latent heads, with the scaling of queries among its parameters. Its fraction of rotated dimensions is
    that of a head's rotary part."""

    rope: Rope

    @property
    def keys(self) -> tuple[str, ...]:
        return self.rope.keys

    def read(self, config: Reading) -> Fields:
        path, parameters = self.rope.parameters(config)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            rule = "must not be default, with which transformers rotates all dimensions of a head"
            config.refuse(f"{path}.rope_type", kind, rule, "use linear with the factor 1.0")
        self._check_fraction(config, parameters.pop(FRACTION, config.raw(FRACTION)))
        beta, original = parameters.pop(BETA, None), config.raw(ORIGINAL) or parameters.get(ORIGINAL)
        parameters.pop("max_position_embeddings", None)
        scaling = {"coefficient": beta, "tokens": original} if beta else None
        if beta and original is None:
            config.refuse(f"{path}.{ORIGINAL}", None, f"is required by {BETA}", "add it to config.json", code="missing")
        rope = self.rope.rope_of(config, path, {**parameters, FRACTION: 1}, config.raw("rope_theta"))
        return {"attention.rope": rope, "attention.query_scaling": scaling}

    def _check_fraction(self, config: Reading, fraction: Any) -> None:
        rotary, plain = (config.get(f"qk_{part}_head_dim", int) for part in ("rope", "nope"))
        if fraction is None or rotary is None or plain is None:
            return
        is_fraction = type(fraction) in (int, float) and 0 < fraction <= 1
        if not is_fraction or round((rotary + plain) * Fraction(fraction)) != rotary:
            rule = f"must be qk_rope_head_dim (={rotary}) over the dimensions of a head (={rotary + plain})"
            config.refuse(FRACTION, fraction, rule, "remove it")

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        parameters = {
            BETA: value(spec, "attention.query_scaling.coefficient") or 0.0,
            ORIGINAL: value(spec, "attention.query_scaling.tokens") or _ORIGINAL_TOKENS,
        }
        return _with_parameters(self.rope.write(spec), {**parameters, **_fraction(spec)})

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        keys = self.rope.older(spec, config)
        return _with_parameters({key: keys[key] for key in keys if key != FRACTION}, _fraction(spec))


def _fraction(spec: LanguageModelSpec) -> dict[str, float]:
    attention = spec.attention
    if not isinstance(attention, LatentAttentionSpec):
        return {}
    return {FRACTION: attention.rope_dim / (attention.head_dim + attention.rope_dim)}


def _with_parameters(keys: Mapping[str, Any], parameters: Mapping[str, float]) -> dict[str, Any]:
    """Keys with further parameters in both forms."""
    forms = ("rope_parameters", "rope_scaling")
    return {key: {**parameters, **entry} if key in forms and entry else entry for key, entry in keys.items()}


MISTRAL4 = Family(
    model_types=("mistral4",),
    architecture="Mistral4ForCausalLM",
    defaults={
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 32, "n_shared_experts": 1, "n_routed_experts": 128,
        "routed_scaling_factor": 1.0, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 0,
        "norm_topk_prob": True, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "rope_interleave": True, "attention_bias": False,
    },
    fields=(
        *DECODER,
        FULL_LAYERS,
        *LATENT_KEYS,
        QueryScalingRope(
            Rope(
                pairing="key",
                default=(
                    ("rope_type", "yarn"), ("factor", 128.0), ("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", 1.0),
                    ("mscale_all_dim", 1.0), (ORIGINAL, _ORIGINAL_TOKENS), (BETA, 0.1),
                ),
            )
        ),
        FirstDense(),
        SharedExpertCount(),
        Key("n_routed_experts", "moe.num_experts"),
        Key("num_experts_per_tok", "moe.top_k"),
        Key("moe_intermediate_size", "moe.hidden_dim"),
        Key("norm_topk_prob", "moe.renormalize_gates", bool),
        Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
        always(moe__router="softmax_topk", moe__activation="swiglu", moe__aux_coefficient=0.0),
    ),
    only={"n_group": (1,), "topk_group": (1,)},
    unused_keys=LATENT_UNUSED,
    aliases={"num_local_experts": "n_routed_experts"},
    tensors=(*STACK, *LATENT, *DENSE, *router("mlp.gate.weight"), *FUSED, *shared_experts("mlp.shared_experts")),
)  # fmt: skip
