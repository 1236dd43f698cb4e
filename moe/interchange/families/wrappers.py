"""Multimodal model types whose language model is of a known family."""

from collections.abc import Mapping
from dataclasses import replace

from moe.interchange.families.qwen3_5_moe import QWEN3_5_MOE_TEXT
from moe.interchange.family import Family, TensorRow
from moe.interchange.wrapper import Wrapper, renamed

_UNDER_LANGUAGE_MODEL = {"model.": "model.language_model.", "lm_head.": "lm_head."}
_QWEN_TOKENS = frozenset({"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"})

_WRAPPERS: tuple[tuple[Wrapper, Mapping[str, Family]], ...] = (
    (
        Wrapper(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            hub_prefixes=_UNDER_LANGUAGE_MODEL,
            memory_prefixes=_UNDER_LANGUAGE_MODEL,
            unused_keys=_QWEN_TOKENS,
            only={"language_model_only": (False,)},
            fused_on_hub=True,
        ),
        {"qwen3_5_moe_text": QWEN3_5_MOE_TEXT, "qwen3_5_moe": QWEN3_5_MOE_TEXT},
    ),
)
"""Each with its language models' families by their `model_type`; the first is the default."""


def wrapped(family: Family, wrapper: Wrapper) -> Family:
    """A language model's family, with the names that its tensors have in a wrapper."""

    def rows(table: tuple[TensorRow, ...], prefixes: Mapping[str, str]) -> tuple[TensorRow, ...]:
        return tuple(replace(row, tensor_name=renamed(row.tensor_name, prefixes)) for row in table)

    fused_names = {row.parameter_name for row in family.fused_tensors}
    in_memory = (*(row for row in family.tensors if row.parameter_name not in fused_names), *family.fused_tensors)
    hub_tables = [family.tensors, in_memory]
    written, also_read = reversed(hub_tables) if wrapper.fused_on_hub else hub_tables
    pattern = family.extra_head_pattern
    return replace(
        family,
        model_types=(wrapper.model_type,),
        architecture=wrapper.architecture,
        tensors=rows(written, wrapper.hub_prefixes),
        read_tensors=rows(also_read, wrapper.hub_prefixes),
        fused_tensors=rows(in_memory, wrapper.memory_prefixes),
        extra_head_pattern=None if pattern is None else renamed(pattern, wrapper.hub_prefixes),
        wrapper=wrapper,
        text_family=family,
    )


WRAPPED_FAMILIES: Mapping[str, Mapping[str, Family]] = {
    wrapper.model_type: {model_type: wrapped(family, wrapper) for model_type, family in families.items()}
    for wrapper, families in _WRAPPERS
}
"""Families by the wrapper's and the language model's `model_type`."""
