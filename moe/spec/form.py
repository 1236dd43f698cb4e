"""Storage forms of a frozen matrix: full width, bfloat16, or quantized elements with a scale per block."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from moe.spec.parameter import Dim, Form, Parameter

CODED: tuple[Form, ...] = ("bfloat16", "int8", "nf4")
"""Forms that are dequantized (or cast) where they are multiplied."""
BLOCK = 64
"""Consecutive values along one dimension that share a scale (QLoRA, arXiv 2305.14314, section 3)."""
SCALES = "_scales"
"""Suffix of the name of a matrix's scales; the quantized elements have the matrix's name."""

ItemDtype = Literal["float32", "bfloat16", "int8", "uint8"]
ITEM_BYTES: dict[ItemDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}
_ITEMS: dict[Form, ItemDtype] = {"bfloat16": "bfloat16", "int8": "int8", "nf4": "uint8"}
_UNSPLIT: tuple[Dim, ...] = ("model", "vocab", "none")
"""Dimensions that no rank computes a part of."""


def block_dim(dims: Sequence[Dim]) -> int:
    """Return the dimension that quantization blocks lie along: the last one that is never split where the matrix is
    multiplied, so that blocks do not depend on the layout."""
    return next(dim for dim in reversed(range(len(dims))) if dims[dim] in _UNSPLIT)


def num_codes(form: Form, length: int) -> int:
    """Number of stored items for `length` values along the block dimension."""
    return -(-length // 2) if form == "nf4" else length


def num_scales(length: int) -> int:
    """Number of blocks for `length` values."""
    return -(-length // BLOCK)


def kept(parameter: Parameter) -> Iterator[tuple[Parameter, ItemDtype | None]]:
    """Yield (tensor, dtype) pairs that a parameter is stored as; dtype None is that of the other weights.

    A quantized matrix is stored as its elements (two nf4 elements per byte) and a scale per block, split like the
    parameter.
    """
    if parameter.form == "full":
        yield parameter, None
        return
    at = block_dim(parameter.dims)
    length = parameter.shape[at]
    yield _of(parameter, "", at, num_codes(parameter.form, length)), _ITEMS[parameter.form]
    if parameter.form != "bfloat16":
        yield _of(parameter, SCALES, at, num_scales(length)), "float32"


def _of(parameter: Parameter, ending: str, at: int, length: int) -> Parameter:
    shape = (*parameter.shape[:at], length, *parameter.shape[at + 1 :])
    return replace(parameter, name=parameter.name + ending, shape=shape)


def kept_bytes(parameter: Parameter, width: int) -> int:
    """Stored bytes of a parameter, if other weights take `width` bytes each."""
    return sum(tensor.numel * (ITEM_BYTES[dtype] if dtype else width) for tensor, dtype in kept(parameter))
