"""Quantised weights that are decoded as they are read: GPT-OSS's MXFP4 and DeepSeek's FP8 in blocks. No torch."""

from dataclasses import dataclass
from typing import Any, Literal

from moe.interchange.family import Family
from moe.spec import Problem

_REMEDY = "use a folder whose weights are bfloat16, or decode them first"
FP8_BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantization:
    """How a folder's weights are quantised."""

    method: Literal["mxfp4", "fp8"]
    block: tuple[int, int] = FP8_BLOCK
    """Rows and columns of FP8 that have one scale."""


def quantization_of(config: Any, place: str, family: Family) -> tuple[Quantization | None, Problem | None]:
    """Format that a `quantization_config` names, and the problems in it."""
    if config is None:
        return None, None
    if not isinstance(config, dict):
        return None, Problem("wrong_type", place, config, "must be an object", _REMEDY)
    method = config.get("quant_method")
    if method == "mxfp4" and family.model_types[0] == "gpt_oss":
        return Quantization("mxfp4"), None
    if method == "fp8" and config.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        block = config.get("weight_block_size", list(FP8_BLOCK))
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return Quantization("fp8", (block[0], block[1])), None
        return None, Problem("invalid_value", f"{place}.weight_block_size", block, "must be two numbers", _REMEDY)
    rule = "must be fp8 in blocks, or mxfp4 of gpt_oss; no other is supported"
    return None, Problem("unsupported", f"{place}.quant_method", method, rule, _REMEDY)
