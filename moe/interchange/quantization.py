"""Formats of quantized weights that are dequantized on reading, by `quantization_config` or `hf_quant_config.json`. No
torch."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from moe.interchange.family import Family
from moe.interchange.reading import json_equal
from moe.spec import Problem, ProblemCode

Format = Literal["mxfp4", "fp8", "pack-quantized", "nvfp4-pack-quantized", "modelopt-nvfp4", "modelopt-int4"]
"""Format of a tensor: MXFP4 (GPT-OSS), FP8 in blocks, int4 and NVFP4 (arXiv 2509.25149) as compressed-tensors stores
them, and NVFP4 and int4 of NVIDIA's Model Optimizer."""
Scheme = Format | Literal["modelopt"]
"""Scheme of a folder: one format, or the Model Optimizer's, whose tensors differ in format."""

_REMEDY = "use a folder with bfloat16 weights, or dequantize them first"
FP8_BLOCK = (128, 128)
NVFP4_BLOCK = (1, 16)
_ACTIVATIONS = "the quantization of activations is not applied: it is for inference"
_KV_CACHE = "the quantization of the KV cache is not applied: it is for inference"

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
_MODELOPT_ALGORITHMS: Mapping[str, bool] = {
    "FP8": True, "FP8_PER_CHANNEL_PER_TOKEN": True, "FP8_PB_WO": False, "fp8_pb_wo": False, "MXFP8": True,
    "NVFP4": True, "NVFP4_AWQ": True, "W4A16_NVFP4": False, "W4A16_AWQ": False,
}  # fmt: skip
"""Whether each algorithm for weights quantizes activations, too (`process_layer_quant_config` in
modelopt/torch/export/quant_utils.py, release 0.47)."""
_MIXED = "MIXED_PRECISION"
_KV_CACHES = ("FP8", "INT8", "NVFP4", "NVFP4_AFFINE")
_AWQ: _Allowed = {"has_zero_point": (False, None), "pre_quant_scale": (True, False, None)}
_MODELOPT: _Allowed = {
    **_AWQ, "quant_algo": (*_MODELOPT_ALGORITHMS, _MIXED, None), "kv_cache_quant_algo": (None, *_KV_CACHES),
    "kv_cache_scheme": (None, *_KV_CACHES, {"dynamic": False, "num_bits": 8, "type": "float"}),
}  # fmt: skip
_MODELOPT_LAYER: _Allowed = {**_AWQ, "quant_algo": tuple(_MODELOPT_ALGORITHMS)}
_MODELOPT_WEIGHTS: _Allowed = {
    "num_bits": (4, 8), "type": ("float", "int"), "dynamic": (False, None), "strategy": (None, "channel"),
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
    """Quantization scheme of a folder's weights."""

    scheme: Scheme
    block: tuple[int, int] = (1, 32)
    """Rows and columns of values that share one scale."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


@dataclass(frozen=True)
class QuantizationFile:
    """Content of `hf_quant_config.json`, in which older releases of NVIDIA's Model Optimizer describe the weights of a
    folder whose `config.json` does not."""

    content: Mapping[str, Any]
    path: str

    def config(self) -> tuple[Any, str]:
        """(its equivalent to a `quantization_config`, path in errors)."""
        section = self.content.get("quantization")
        config = {"quant_method": "modelopt", **section} if isinstance(section, dict) else section
        return config, f"{self.path}:quantization"


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

    def objects(self, key: str, required_key: str, kind: type) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the objects of the object at `key`, each with its path: groups of equally quantized layers, or layers.
        Each must have a `required_key` of this kind."""
        objects = self.config.get(key)
        if not isinstance(objects, dict) or not objects:
            self.refuse(key, objects, "must be an object with an entry", "wrong_type")
            return
        for name, entry in objects.items():
            if isinstance(entry, dict) and isinstance(entry.get(required_key), kind):
                yield f"{key}.{name}.", entry
            else:
                self.refuse(f"{key}.{name}", None, f"must be an object with `{required_key}`", "wrong_type")


def quantization_of(
    config: Any, place: str, family: Family, file: QuantizationFile | None = None
) -> tuple[Quantization | None, list[Problem]]:
    """(scheme, problems) of the `quantization_config` at `place`, or of the file if it is None."""
    if config is None and file is None:
        return None, []
    if config is None and file is not None:
        config, place = file.config()
    if not isinstance(config, dict):
        return None, [Problem("wrong_type", place, config, "must be an object", _REMEDY)]
    method, section = config.get("quant_method"), config.get("quantization")
    if method == "modelopt" and isinstance(section, dict):  # as in `hf_quant_config.json`
        outer = {key: value for key, value in config.items() if key != "quantization"}
        config, place = {**outer, **section}, f"{place}.quantization"
    settings = _QuantizationConfig(config, place)
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
    for path, group in settings.objects("config_groups", "weights", dict):
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
    config, has_layers = settings.config, settings.config.get("quant_algo") == _MIXED
    settings.check({key: value for key, value in config.items() if key != "quantized_layers" or not has_layers}, "",
                   _MODELOPT)  # fmt: skip
    layers = [("", config)]
    if has_layers:
        layers = list(settings.objects("quantized_layers", "quant_algo", str))
        for path, layer in layers:
            settings.check(layer, path, _MODELOPT_LAYER)
    for path, layer in layers:
        if "NVFP4" in str(layer.get("quant_algo")):
            settings.check({"group_size": layer.get("group_size")}, path, {"group_size": (*NVFP4_BLOCK[1:], None)})
    if "config_groups" in config:
        for path, group in settings.objects("config_groups", "weights", dict):
            settings.check(group, path, {**_AWQ, "output_activations": (None,)})
            settings.check(group["weights"], f"{path}weights.", _MODELOPT_WEIGHTS)
    has_activations = any(_MODELOPT_ALGORITHMS.get(str(layer.get("quant_algo"))) for _, layer in layers)
    has_kv_cache = any(config.get(key) is not None for key in ("kv_cache_scheme", "kv_cache_quant_algo"))
    notes = (*((_ACTIVATIONS,) if has_activations else ()), *((_KV_CACHE,) if has_kv_cache else ()))
    return Quantization("modelopt", notes=notes)
