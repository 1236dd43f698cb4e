"""Releases of transformers that can load an export, and differences in what the older one computes. No torch."""

from collections.abc import Iterator

from moe.interchange.family import Family
from moe.spec import LanguageModelSpec
from moe.spec.language import Mamba2Spec

CURRENT, OLDER = "5.24.0", "4.57.6"
"""Releases of transformers that exports of every family were compared with (`python -m
benchmarks.older_transformers`)."""
PEFT = "0.21.2"
"""Release of PEFT that adapters were compared with."""
UNKNOWN_TO_OLDER = (
    "gemma4_text",
    "mimo_v2_flash",
    "minimax_m2",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "nemotron_h",
    "glm4_moe_lite",
    "hy_v3",
    "exaone_moe",
    "flint",
    "mellum",
    "bailing_moe",
    "bailing_moe_v2",
    "mistral4",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
    "deepseek_v32",
    "glm_moe_dsa",
)
"""Families that transformers 4.57 lacks."""
WRAPPERS_OF_OLDER = ("gemma3", "glm4v_moe", "llama4", "mistral3", "qwen3_vl_moe")
"""Types of multimodal models that transformers 4.57 has."""
_OTHER_CLASSES = {
    "bailing_moe": (
        "the code published with Ling 1 (BailingMoeForCausalLM), with which it was not compared; transformers has no "
        "bailing_moe"
    ),
    "bailing_moe_v2": (
        "the code published with Ling 2.0 (BailingMoeV2ForCausalLM), with which it was not compared; transformers has "
        "no bailing_moe_v2"
    ),
    "mistral4": (
        f"transformers 5 (compared with {CURRENT}) by its class, Mistral4ForCausalLM, as AutoModelForCausalLM has no "
        "mistral4; not transformers 4"
    ),
}
"""Classes that load models of families which are not in transformers' table of language models."""
_SWIGLU = (1.702, 7.0)
"""Alpha and limit that transformers 4 hard-codes for GPT-OSS."""


def readers(spec: LanguageModelSpec, family: Family) -> str:
    """Releases that can load a model's export, for its card."""
    if (other_class := _OTHER_CLASSES.get(family.model_types[0])) is not None:
        return other_class
    reasons = list(unlike_older(spec, family))
    if not reasons:
        return f"transformers 5 and 4 (compared with {CURRENT} and {OLDER}), and vLLM, which reads the same keys"
    return f"transformers 5 (compared with {CURRENT}); not transformers 4: {'; '.join(reasons)}"


def adapter_readers(spec: LanguageModelSpec, family: Family, parameters: bool) -> str:
    """Releases that can load an adapter, for its card. `parameters`: whether it targets parameters, such as fused
    experts, which PEFT supports since 0.17."""
    reasons = list(unlike_older(spec, family))
    if family.wrapper is not None:
        reasons.append("adapters of multimodal models were not compared with it")
    if parameters:
        reasons.append("its expert tensors differ from those that this adapter targets")
    peft = f"PEFT {'from 0.17 on ' if parameters else ''}(compared with {PEFT})"
    if not reasons:
        return f"{peft} on transformers 5 and 4 (compared with {CURRENT} and {OLDER})"
    return f"{peft} on transformers 5 (compared with {CURRENT}); not on transformers 4: {'; '.join(reasons)}"


def unlike_older(spec: LanguageModelSpec, family: Family) -> Iterator[str]:
    """Yield the reasons why transformers 4 does not compute the same function as this model."""
    name, wrapper = (family.text_family or family).model_types[0], family.wrapper
    if wrapper is not None and wrapper.model_type not in WRAPPERS_OF_OLDER:
        yield f"it has no {wrapper.model_type}"
    if name in UNKNOWN_TO_OLDER:
        yield f"it has no {name}"
    if name == "llama4_text":
        if not any(spec.window_of(layer) for layer in range(spec.num_layers)):
            yield "it requires layers with chunks"
        if getattr(spec.attention, "bias", False):
            yield "its attention has no biases"
        if getattr((spec.local_attention or spec.attention).rope.scaling, "kind", "llama3") != "llama3":
            yield "it scales RoPE only as Llama 3.1 does"
    if name == "qwen2_moe" and any(spec.window_of(layer) for layer in range(spec.num_layers)):
        yield "it applies the window of some layers to all"
    if name == "gemma3_text" and spec.local_attention is not None and spec.local_attention.rope.scaling is not None:
        yield "it does not scale RoPE in layers with a sliding window"
    if name == "deepseek_v2" and spec.attention.rope.sharpening != 1:
        yield "it lacks YaRN's factor of the scores (mscale_all_dim)"
    if isinstance(spec.linear_attention, Mamba2Spec) and spec.linear_attention.num_groups > 1:
        yield "it normalizes the groups of Mamba-2 together, and orders their heads otherwise"
    if name == "gpt_oss" and spec.moe is not None:
        swiglu = spec.moe.activation_alpha, spec.moe.activation_limit
        if swiglu != _SWIGLU:
            yield (f"its SwiGLU always has alpha {_SWIGLU[0]} and limit {_SWIGLU[1]}, regardless of config.json")
