"""Multimodal model types whose language model is of a known family."""

from collections.abc import Mapping
from dataclasses import replace

from moe.interchange.families.deepseek_v3 import DEEPSEEK_V3
from moe.interchange.families.gemma3_text import GEMMA3_TEXT
from moe.interchange.families.gemma4_text import GEMMA4_TEXT
from moe.interchange.families.glm4v_moe import GLM4V_MOE_TEXT
from moe.interchange.families.llama4 import LLAMA4_TEXT
from moe.interchange.families.qwen3_5_moe import QWEN3_5_MOE_TEXT
from moe.interchange.families.qwen3_vl_moe import QWEN3_VL_MOE_TEXT
from moe.interchange.family import Family, TensorRow
from moe.interchange.wrapper import Wrapper, replace_prefix

_UNDER_LANGUAGE_MODEL = {"model.": "model.language_model.", "lm_head.": "lm_head."}
_WITHIN_LANGUAGE_MODEL = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_QWEN_TOKENS = frozenset({"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"})

_QWEN3_5_MOE = Wrapper(
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration",
    hub_prefixes=_UNDER_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    unused_keys=_QWEN_TOKENS,
    only={"language_model_only": (False,)},
    fused_on_hub=True,
)
_QWEN3_VL_MOE = Wrapper(
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    "Qwen3VLMoeForConditionalGeneration",
    hub_prefixes=_UNDER_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    unused_keys=_QWEN_TOKENS,
)
_GLM4V_MOE = Wrapper(
    "glm4v_moe",
    "glm4v_moe_text",
    "Glm4vMoeForConditionalGeneration",
    hub_prefixes=_UNDER_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    unused_keys=frozenset(
        f"{name}_token_id" for name in ("image", "video", "image_start", "image_end", "video_start", "video_end")
    ),
)
_KIMI_K25 = Wrapper(
    "kimi_k25",
    "deepseek_v3",
    "Kimi_K25ForConditionalGeneration",
    hub_prefixes=_WITHIN_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    ties_embeddings=True,
    unused_keys=_QWEN_TOKENS
    | {
        "media_placeholder_token_id", "video_placeholder", "use_unified_vision_chunk", "ignore_index",
        "projection_hidden_size", "projection_layer_norm_eps",
    },
)  # fmt: skip
_MISTRAL3 = Wrapper(
    "mistral3",
    "mistral",
    "Mistral3ForConditionalGeneration",
    hub_prefixes=_WITHIN_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    ties_embeddings=True,
    unused_keys=frozenset({
        "image_token_index", "image_token_id", "multimodal_projector_bias", "projector_hidden_act",
        "spatial_merge_size", "vision_feature_layer",
    }),
)  # fmt: skip
_GEMMA3 = Wrapper(
    "gemma3",
    "gemma3_text",
    "Gemma3ForConditionalGeneration",
    hub_prefixes=_WITHIN_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    ties_embeddings=True,
    unused_keys=frozenset({
        "image_token_index", "boi_token_index", "eoi_token_index", "image_token_id", "boi_token_id", "eoi_token_id",
        "mm_tokens_per_image",
    }),
)  # fmt: skip
_LLAMA4 = Wrapper(
    "llama4",
    "llama4_text",
    "Llama4ForConditionalGeneration",
    hub_prefixes=_WITHIN_LANGUAGE_MODEL,
    memory_prefixes=_WITHIN_LANGUAGE_MODEL,
    unused_keys=frozenset(f"{name}_{kind}" for name in ("image", "boi", "eoi") for kind in ("token_index", "token_id")),
)
_GEMMA4 = Wrapper(
    "gemma4",
    "gemma4_text",
    "Gemma4ForConditionalGeneration",
    hub_prefixes=_UNDER_LANGUAGE_MODEL,
    memory_prefixes=_UNDER_LANGUAGE_MODEL,
    ties_embeddings=True,
    parts=("vision_config", "audio_config"),
    unused_keys=frozenset({
        "image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id", "boa_token_id",
        "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image",
    }),
)  # fmt: skip


def wrapped_families(by_type: Mapping[str, Family]) -> dict[str, dict[str, Family]]:
    """Families by the wrapper's and the language model's `model_type`; `by_type`: families of language models."""
    language_models: tuple[tuple[Wrapper, Mapping[str, Family]], ...] = (
        (_QWEN3_5_MOE, {"qwen3_5_moe_text": QWEN3_5_MOE_TEXT, "qwen3_5_moe": QWEN3_5_MOE_TEXT}),
        (_QWEN3_VL_MOE, {"qwen3_vl_moe_text": QWEN3_VL_MOE_TEXT, "qwen3_vl_moe": QWEN3_VL_MOE_TEXT}),
        (_GLM4V_MOE, {"glm4v_moe_text": GLM4V_MOE_TEXT, "glm4v_moe": GLM4V_MOE_TEXT}),
        (_KIMI_K25, {"deepseek_v3": DEEPSEEK_V3, "kimi_k2": DEEPSEEK_V3}),
        (_LLAMA4, {"llama4_text": LLAMA4_TEXT}),
        (_GEMMA3, {"gemma3_text": GEMMA3_TEXT}),
        (_GEMMA4, {"gemma4_text": GEMMA4_TEXT}),
        (_MISTRAL3, by_type),  # its class in transformers takes any
    )
    return {
        wrapper.model_type: {model_type: _in_wrapper(family, wrapper) for model_type, family in families.items()}
        for wrapper, families in language_models
    }


def _in_wrapper(family: Family, wrapper: Wrapper) -> Family:
    """A language model's family, with the names that its tensors have in a wrapper."""

    def rows(table: tuple[TensorRow, ...], prefixes: Mapping[str, str]) -> tuple[TensorRow, ...]:
        return tuple(replace(row, tensor_name=replace_prefix(row.tensor_name, prefixes)) for row in table)

    fused_names = {row.parameter_name for row in family.fused_tensors}
    in_memory = (*(row for row in family.tensors if row.parameter_name not in fused_names), *family.fused_tensors)
    hub_tables = [family.tensors, in_memory]
    written_rows, readable_rows = reversed(hub_tables) if wrapper.fused_on_hub else hub_tables
    pattern = family.mtp_pattern
    return replace(
        family,
        model_types=(wrapper.model_type,),
        architecture=wrapper.architecture,
        tensors=rows(written_rows, wrapper.hub_prefixes),
        read_tensors=rows(readable_rows, wrapper.hub_prefixes),
        fused_tensors=rows(in_memory, wrapper.memory_prefixes),
        mtp_pattern=None if pattern is None else replace_prefix(pattern, wrapper.hub_prefixes),
        wrapper=wrapper,
        text_family=family,
    )
