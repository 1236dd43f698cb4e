"""Folders with weights packed as compressed-tensors and Model Optimizer publish them, and plain readings of these."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.interchange.folders import reconfigure, rewrite

SIDECAR = "hf_quant_config.json"

INT4_WEIGHTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip
NVFP4_WEIGHTS = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_WEIGHTS, "input_activations": None,
                                  "output_activations": None}},
}  # fmt: skip
"""As Kimi-K2-Thinking has it."""
NVFP4: dict[str, Any] = {
    **INT4, "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_WEIGHTS, "input_activations":
                                  {**NVFP4_WEIGHTS, "dynamic": "local"}, "format": "nvfp4-pack-quantized"}},
}  # fmt: skip
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": {"dynamic": False, "num_bits": 4},
                                  "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
}  # fmt: skip


def sidecar(algorithm: str | None, **fields: Any) -> dict[str, Any]:
    """Content of `hf_quant_config.json`, as nvidia/DeepSeek-R1-FP4 has it."""
    section = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], **fields}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": section}


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

Pack = Callable[[str, int, int], tuple[dict[str, Tensor], Tensor]]
"""(module, rows, columns) to the module's tensors and the values that they decode into."""


def group_of(size: int, name: str = "group_0") -> dict[str, Any]:
    """Config of int4 in groups of another size."""
    return {**INT4, "config_groups": {name: {"targets": ["Linear"], "weights": {**INT4_WEIGHTS, "group_size": size}}}}


def int4(group: int) -> Pack:
    """Random int4 in groups of a row, eight to an int32, the lowest bits first."""

    def pack(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        words = torch.randint(-(2**31), 2**31, (rows, -(-columns // 8)), dtype=torch.int64).to(torch.int32)
        scales = (torch.rand(rows, columns // group) + 0.5).bfloat16()
        values = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                code = (int(words[row, column // 8]) >> (4 * (column % 8))) & 15
                values[row, column] = (code - 8) * float(scales[row, column // group])
        tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, values

    return pack


def nvfp4(names: Mapping[str, str], divides: bool) -> Pack:
    """Random E2M1 in blocks of 16 of a row, two to a byte, the lower bits first, with float8 scales, and a global scale
    that divides or multiplies them."""

    def pack(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        content = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scales = (torch.rand(rows, columns // 16) * 4 + 0.1).to(torch.float8_e4m3fn)
        global_scale = torch.tensor([300.0 if divides else 0.003])
        factors = scales.float() / global_scale if divides else scales.float() * global_scale
        values = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                code = (int(content[row, column // 2]) >> (4 * (column % 2))) & 15
                value = E2M1[code % 8] * (-1 if code >= 8 else 1)
                values[row, column] = torch.tensor(value) * factors[row, column // 16]
        tensors = {"values": content, "scales": scales, "global": global_scale if divides else global_scale[0],
                   "input": torch.tensor([1.0])}  # fmt: skip
        return {f"{module}.{names[part]}": tensor for part, tensor in tensors.items()}, values

    return pack


OF_COMPRESSED_TENSORS = nvfp4(
    {
        "values": "weight_packed",
        "scales": "weight_scale",
        "global": "weight_global_scale",
        "input": "input_global_scale",
    },
    divides=True,
)
OF_MODELOPT = nvfp4(
    {"values": "weight", "scales": "weight_scale", "global": "weight_scale_2", "input": "input_scale"}, divides=False
)


def fp8(block: tuple[int, int] | None, shape: Callable[[int, int], tuple[int, ...]]) -> Pack:
    """Random float8 with a scale per block, or per matrix, stored in the shape that a number of rows and columns of
    blocks gives."""

    def pack(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        content = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        block_rows, block_columns = (min(size, rows if dim == 0 else columns)
                                     for dim, size in enumerate(block or (rows, columns)))  # fmt: skip
        grid = (-(-rows // block_rows), -(-columns // block_columns))
        scales = torch.rand(grid) + 0.5
        spread = scales.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
        tensors = {"weight": content, "weight_scale": scales.reshape(shape(*grid)), "input_scale": torch.tensor(1.0)}
        return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, content.float() * spread

    return pack


def mxfp8(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random float8 with a power of two per 32 values of a row."""
    content = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 135, (rows, columns // 32), dtype=torch.uint8)
    values = content.float() * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return {f"{module}.weight": content, f"{module}.weight_scale": exponents}, values


def awq(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Random int4 of AWQ in two's complement, in groups of 8, two rows to a byte, and a factor of each input."""
    content = torch.randint(0, 256, (rows // 2, columns), dtype=torch.uint8)
    scales, factors = torch.rand(rows, columns // 8) + 0.5, torch.rand(columns) + 0.5
    values = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            code = (int(content[row // 2, column]) >> (4 * (row % 2))) & 15
            values[row, column] = (code - 16 * (code >= 8)) * (scales[row, column // 8] * factors[column])
    tensors = {"weight": content, "weight_scale": scales, "pre_quant_scale": factors}
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, values


def mixed(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """NVFP4 and FP8 in one folder, as Nemotron-3 has them, with scales of a quantized KV cache."""
    pack = fp8(None, lambda *_: ()) if "down_proj" in module else OF_MODELOPT
    tensors, values = pack(module, rows, columns)
    scales = {f"model.layers.1.self_attn.{name}": torch.tensor(1.0) for name in ("k_proj.k_scale", "v_proj.v_scale")}
    return {**tensors, **scales}, values


def pack_experts(folder: Path, config: Mapping[str, Any], pack: Pack) -> dict[str, Tensor]:
    """Replace the routed experts of a folder by random packed ones; return the values by the names of the matrices.
    `config` is a `quantization_config`, or the content of `hf_quant_config.json`."""
    values: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor]) -> None:
        torch.manual_seed(1)
        for name in [name for name in tensors if ".experts." in name]:
            rows, columns = tensors.pop(name).shape
            packed, values[name] = pack(name.removesuffix(".weight"), rows, columns)
            tensors.update(packed)

    rewrite(folder, change)
    if "quantization" in config and "quant_method" not in config:
        (folder / SIDECAR).write_text(json.dumps(config))
    else:
        reconfigure(folder, quantization_config=config)
    return values
