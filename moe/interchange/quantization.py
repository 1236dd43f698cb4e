"""Formats of quantized weights that are dequantized on reading, by `quantization_config`. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe.interchange.family import Family
from moe.interchange.reading import json_equal
from moe.spec import Problem, ProblemCode

Format = Literal["mxfp4", "fp8", "pack-quantized", "nvfp4-pack-quantized", "modelopt-nvfp4"]
"""MXFP4 (GPT-OSS), FP8 in blocks (DeepSeek), int4 and NVFP4 (arXiv 2509.25149) as compressed-tensors stores them, and
NVFP4 of NVIDIA's Model Optimizer."""

_REMEDY = "use a folder with bfloat16 weights, or dequantize them first"
FP8_BLOCK = (128, 128)
NVFP4_BLOCK = (1, 16)
_ACTIVATIONS = "the quantization of activations is not applied: quantization_config has it for inference"


@dataclass(frozen=True)
class Quantization:
    """Quantization format of a folder's weights."""

    format: Format
    block: tuple[int, int] = (1, 32)
    """Rows and columns of values that share one scale."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


class _Settings:
    """A `quantization_config`, with the problems of the keys that were checked."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self.config, self.place = config, place
        self.problems: list[Problem] = []

    def refuse(self, key: str, value: Any, rule: str, code: ProblemCode = "unsupported") -> None:
        self.problems.append(Problem(code, f"{self.place}.{key}", value, rule, _REMEDY))

    def only(self, config: Mapping[str, Any], path: str, key: str, allowed_values: Iterable[Any]) -> None:
        """Refuse other values of a key than these; the first is the one of a missing key."""
        allowed_values = list(allowed_values)
        value = config.get(key, allowed_values[0])
        if not any(json_equal(value, allowed_value) for allowed_value in allowed_values):
            choices = " or ".join(map(repr, allowed_values))
            self.refuse(f"{path}{key}", value, f"must be {choices}; nothing else is supported")

    def groups(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the groups of equally quantized layers, each with its path."""
        groups = self.config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            self.refuse("config_groups", groups, "must be an object with a group", "wrong_type")
            return
        for name, group in groups.items():
            if isinstance(group, dict) and isinstance(group.get("weights"), dict):
                yield f"config_groups.{name}.", group
            else:
                self.refuse(f"config_groups.{name}", None, "must be an object with `weights`", "wrong_type")


def quantization_of(config: Any, place: str, family: Family) -> tuple[Quantization | None, list[Problem]]:
    """(format, problems) of a `quantization_config`."""
    if config is None:
        return None, []
    if not isinstance(config, dict):
        return None, [Problem("wrong_type", place, config, "must be an object", _REMEDY)]
    settings = _Settings(config, place)
    method = config.get("quant_method")
    if method == "mxfp4" and family.model_types[0] == "gpt_oss":
        quantization: Quantization | None = Quantization("mxfp4")
    elif method == "fp8" and config.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        quantization = _fp8(settings)
    elif method == "compressed-tensors":
        quantization = _compressed_tensors(settings)
    elif method == "modelopt":
        quantization = _modelopt(settings)
    else:
        quantization = None
        rule = "must be fp8 in blocks, compressed-tensors, modelopt, or mxfp4 of gpt_oss; no other is supported"
        settings.refuse("quant_method", method, rule)
    return (None if settings.problems else quantization), settings.problems


def _fp8(settings: _Settings) -> Quantization | None:
    block = settings.config.get("weight_block_size", list(FP8_BLOCK))
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return Quantization("fp8", (block[0], block[1]))
    settings.refuse("weight_block_size", block, "must be two numbers", "invalid_value")
    return None


def _compressed_tensors(settings: _Settings) -> Quantization | None:
    config = settings.config
    format_name = config.get("format")
    if format_name not in ("pack-quantized", "nvfp4-pack-quantized"):
        settings.refuse("format", format_name, "must be pack-quantized or nvfp4-pack-quantized; no other is supported")
        return None
    settings.only(config, "", "kv_cache_scheme", (None,))
    settings.only(config, "", "sparsity_config", (None, {}))
    settings.only(config, "", "transform_config", (None, {}))
    is_int = format_name == "pack-quantized"
    sizes: set[int] = set()
    notes: set[str] = set()
    for path, group in settings.groups():
        weights = group["weights"]
        settings.only(group, path, "format", (None, format_name))
        settings.only(group, path, "output_activations", (None,))
        notes |= {_ACTIVATIONS} if group.get("input_activations") else set()
        path = f"{path}weights."
        settings.only(weights, path, "num_bits", (4,))
        settings.only(weights, path, "type", ("int",) if is_int else ("float",))
        settings.only(weights, path, "symmetric", (True,))
        settings.only(weights, path, "strategy", ("group",) if is_int else ("tensor_group",))
        settings.only(weights, path, "dynamic", (False,))
        settings.only(weights, path, "actorder", (None, False, "weight", "static"))  # columns keep their order
        size = weights.get("group_size")
        if is_int and (type(size) is not int or size < 1):
            settings.refuse(f"{path}group_size", size, "must be a positive number", "invalid_value")
        elif not is_int:
            settings.only(weights, path, "group_size", NVFP4_BLOCK[1:])
        elif sizes and size not in sizes:
            settings.refuse(f"{path}group_size", size, f"must be {min(sizes)}, that of the other groups")
        else:
            sizes.add(size)
    if settings.problems:
        return None
    return Quantization(format_name, (1, min(sizes)) if is_int else NVFP4_BLOCK, tuple(notes))


def _modelopt(settings: _Settings) -> Quantization:
    config = settings.config
    settings.only(config, "", "quant_algo", ("NVFP4",))
    settings.only(config, "", "kv_cache_scheme", (None,))
    settings.only(config, "", "kv_cache_quant_algo", (None,))
    settings.only(config, "", "group_size", NVFP4_BLOCK[1:])
    notes = (_ACTIVATIONS,)
    if "config_groups" in config:
        for path, group in settings.groups():
            settings.only(group["weights"], f"{path}weights.", "num_bits", (4,))
            settings.only(group["weights"], f"{path}weights.", "type", ("float",))
            settings.only(group["weights"], f"{path}weights.", "group_size", NVFP4_BLOCK[1:])
    return Quantization("modelopt-nvfp4", NVFP4_BLOCK, notes)
