"""Formats of quantized weights that are dequantized on reading: MXFP4 (GPT-OSS) and block-wise FP8 (DeepSeek). No
torch."""

from dataclasses import dataclass
from typing import Any, Literal

from moe.interchange.family import Family
from moe.spec import Problem

_REMEDY = "use a folder with bfloat16 weights, or dequantize them first"
FP8_BLOCK = (128, 128)


@dataclass(frozen=True)
class Quantization:
    """Quantization format of a folder's weights."""

    method: Literal["mxfp4", "fp8"]
    block: tuple[int, int] = FP8_BLOCK
    """Rows and columns of FP8 values that share one scale."""


def quantization_of(config: Any, place: str, family: Family) -> tuple[Quantization | None, Problem | None]:
    """(format, problem) of a `quantization_config`."""
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
