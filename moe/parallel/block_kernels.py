"""bitsandbytes kernels that dequantize blocks, where it is installed and supports the device: bit-identical to
`quantized.py`, and mostly faster."""

from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from moe.parallel.accelerator import accelerator
from moe.spec.form import BLOCK
from moe.spec.parameter import Form

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Output dtypes of the kernels."""


def dequantize_with_kernel(
    codes: Tensor, scales: Tensor, *, form: Form, dim: int, length: int, dtype: torch.dtype
) -> Tensor | None:
    """Return `length` values along `dim`; None if they are not whole blocks of 64, or no kernel supports them."""
    if length % BLOCK or dtype not in _DTYPES or not runs_on(codes.device):
        return None
    return _dequantize(codes, scales, form, dim, dtype)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether a block of each form is dequantized correctly: the library may not support the device, or be built for
    another one."""
    if _operators() is None or device.type not in ("cpu", "cuda"):
        return False
    try:
        return all(_is_correct(device, dtype) for dtype in _DTYPES)
    except (RuntimeError, AttributeError):  # no kernel for the device, or its library does not load
        return False


def _is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    take = accelerator(device).take
    codes, scales = torch.full((BLOCK,), 0x7F, dtype=torch.uint8), torch.full((1,), 0.5)
    values = _dequantize(take(codes.view(torch.int8)), take(scales), "int8", 0, dtype)
    value_pairs = _dequantize(take(codes[: BLOCK // 2]), take(scales), "nf4", 0, dtype).view(-1, 2).float()
    return bool((values == 63.5).all()) and value_pairs.unique(dim=0).tolist() == [[0.0, 0.5]]


@cache
def _operators() -> Any:
    try:
        import bitsandbytes  # noqa: F401  (registers them)
    except (ImportError, RuntimeError, OSError, AttributeError):  # not installed, or does not load
        return None
    return torch.ops.bitsandbytes


def _dequantize(codes: Tensor, scales: Tensor, form: Form, dim: int, dtype: torch.dtype) -> Tensor:
    codes, scales = (tensor.movedim(dim, -1).contiguous() for tensor in (codes, scales))
    if form == "nf4":
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        values = _operators().dequantize_4bit(
            codes.view(-1, 1), scales.view(-1), BLOCK, "nf4", [prod(shape[:-1]), shape[-1]], dtype
        )
    else:
        shape = tuple(codes.shape)
        values = _operators().dequantize_blockwise(
            codes.view(torch.uint8), scales.view(-1), _numbers(codes.device), BLOCK, dtype
        )
    return values.view(shape).movedim(-1, dim)


@cache
def _numbers(device: torch.device) -> Tensor:
    """`[256]`: value of each byte as an int8."""
    return accelerator(device).take(torch.arange(256, dtype=torch.uint8).view(torch.int8).float())
