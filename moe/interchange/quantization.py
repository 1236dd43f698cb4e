"""Formats of quantized weights that are dequantized on reading, by `quantization_config`. No torch."""

from collections.abc import Iterator, Mapping, Set
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

_Allowed = Mapping[str, tuple[Any, ...]]
"""Supported values by key; None stands for a missing key, too."""
_COMPRESSED_TENSORS: _Allowed = {
    "kv_cache_scheme": (None,), "sparsity_config": (None, {}), "transform_config": (None, {}),
    "moe_sparsity_config": (None,),
}  # fmt: skip
_WEIGHTS: _Allowed = {
    "num_bits": (4,), "symmetric": (True, None), "dynamic": (False, None), "block_structure": (None,),
    "actorder": (None, False, "weight", "static"),  # columns keep their order
}  # fmt: skip
_INT4: _Allowed = {**_WEIGHTS, "type": ("int", None), "strategy": ("group", None)}
_NVFP4: _Allowed = {**_WEIGHTS, "type": ("float",), "strategy": ("tensor_group", None), "group_size": NVFP4_BLOCK[1:]}
_MODELOPT: _Allowed = {
    "quant_algo": ("NVFP4",), "kv_cache_scheme": (None,), "kv_cache_quant_algo": (None,), "group_size": (16, None),
}  # fmt: skip
_FP8 = frozenset({
    "quant_method", "fmt", "scale_fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert",
    "ignored_layers", "packed_modules_mapping", "dequantize",
})  # fmt: skip
"""Known keys of FP8 in blocks: vLLM's name of `modules_to_not_convert` is `ignored_layers`."""
_MXFP4 = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})
"""Known keys of MXFP4."""
_UNREAD = frozenset({
    "quant_method", "format", "config_groups", "ignore", "exclude_modules", "targets", "weights", "group_size",
    "input_activations", "producer", "version", "quantization_status", "global_compression_ratio", "run_compressed",
    "dequantize", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
})  # fmt: skip
"""Keys that are read elsewhere, or that do not say more about stored values than the tensors do."""


@dataclass(frozen=True)
class Quantization:
    """Quantization format of a folder's weights."""

    format: Format
    block: tuple[int, int] = (1, 32)
    """Rows and columns of values that share one scale."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


class _QuantizationConfig:
    """A `quantization_config`, with the problems of the keys that were checked."""

    def __init__(self, config: Mapping[str, Any], place: str) -> None:
        self.config, self.place = config, place
        self.problems: list[Problem] = []

    def refuse(self, key: str, value: Any, rule: str, code: ProblemCode = "unsupported") -> None:
        self.problems.append(Problem(code, f"{self.place}.{key}", value, rule, _REMEDY))

    def check(self, config: Mapping[str, Any], path: str, allowed: _Allowed) -> None:
        """Refuse unsupported values and unknown keys of an object at `path`."""
        for key, allowed_values in allowed.items():
            value = config.get(key)
            if not any(json_equal(value, allowed_value) for allowed_value in allowed_values):
                choices = " or ".join("null" if choice is None else repr(choice) for choice in allowed_values)
                self.refuse(f"{path}{key}", value, f"must be {choices}; nothing else is supported")
        self.check_keys(config, path, allowed.keys() | _UNREAD)

    def check_keys(self, config: Mapping[str, Any], path: str, known_keys: Set[str]) -> None:
        """Refuse unknown keys of an object at `path`."""
        for key in sorted(config.keys() - known_keys):
            if config[key] is not None:
                self.refuse(f"{path}{key}", config[key], "is not a known key", "unknown_key")

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
    settings = _QuantizationConfig(config, place)
    method = config.get("quant_method")
    if method == "mxfp4" and family.model_types[0] == "gpt_oss":
        settings.check_keys(config, "", _MXFP4)
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


def _fp8(settings: _QuantizationConfig) -> Quantization | None:
    settings.check_keys(settings.config, "", _FP8)
    block = settings.config.get("weight_block_size", list(FP8_BLOCK))
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return Quantization("fp8", (block[0], block[1]))
    settings.refuse("weight_block_size", block, "must be two numbers", "invalid_value")
    return None


def _compressed_tensors(settings: _QuantizationConfig) -> Quantization | None:
    format_name = settings.config.get("format")
    if format_name not in ("pack-quantized", "nvfp4-pack-quantized"):
        settings.refuse("format", format_name, "must be pack-quantized or nvfp4-pack-quantized; no other is supported")
        return None
    settings.check(settings.config, "", _COMPRESSED_TENSORS)
    has_activations, is_int = False, format_name == "pack-quantized"
    sizes: set[int] = set()
    for path, group in settings.groups():
        settings.check(group, path, {"format": (None, format_name), "output_activations": (None,)})
        settings.check(group["weights"], f"{path}weights.", _INT4 if is_int else _NVFP4)
        has_activations |= bool(group.get("input_activations"))
        size = group["weights"].get("group_size")
        if type(size) is not int or size < 1:
            settings.refuse(f"{path}weights.group_size", size, "must be a positive number", "invalid_value")
        elif sizes and size not in sizes:
            settings.refuse(f"{path}weights.group_size", size, f"must be {min(sizes)}, that of the other groups")
        else:
            sizes.add(size)
    if settings.problems:
        return None
    return Quantization(format_name, (1, min(sizes)), (_ACTIVATIONS,) if has_activations else ())


def _modelopt(settings: _QuantizationConfig) -> Quantization:
    settings.check(settings.config, "", _MODELOPT)
    if "config_groups" in settings.config:
        for path, group in settings.groups():
            settings.check(group, path, {"output_activations": (None,)})
            settings.check(group["weights"], f"{path}weights.", _NVFP4)
    return Quantization("modelopt-nvfp4", NVFP4_BLOCK, (_ACTIVATIONS,))
