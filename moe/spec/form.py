"""Storage forms of frozen matrices: full, bfloat16, or quantized with a scale per block."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from moe.spec.parameter import Dim, Form, Parameter

CODED: tuple[Form, ...] = ("bfloat16", "int8", "nf4")
"""Forms that are dequantized for each product."""
BLOCK = 64
"""Consecutive values along a dimension that share one scale (QLoRA, arXiv 2305.14314, section 3)."""
SCALES = "_scales"
"""Name suffix of scales; quantized elements have the matrix's name."""

ItemDtype = Literal["float32", "bfloat16", "int8", "uint8"]
ITEM_BYTES: dict[ItemDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}
_ITEMS: dict[Form, ItemDtype] = {"bfloat16": "bfloat16", "int8": "int8", "nf4": "uint8"}
_UNSPLIT: tuple[Dim, ...] = ("model", "vocab", "none")
"""Dimensions that are never split in computation."""


def block_dim(dims: Sequence[Dim]) -> int:
    """Dimension of quantization blocks: the last one that is never split in computation, so that blocks do not depend
    on the layout."""
    return next(dim for dim in reversed(range(len(dims))) if dims[dim] in _UNSPLIT)


def num_codes(form: Form, length: int) -> int:
    """Stored items for `length` values along the block dimension."""
    return -(-length // 2) if form == "nf4" else length


def num_scales(length: int) -> int:
    """Blocks of `length` values."""
    return -(-length // BLOCK)


def stored_tensors(parameter: Parameter) -> Iterator[tuple[Parameter, ItemDtype | None]]:
    """Yield the (tensor, dtype) pairs that a parameter is stored as; None is the dtype of unquantized weights.

    Quantized: elements (two nf4 per byte) and a scale per block, split like the parameter.
    """
    if parameter.form == "full":
        yield parameter, None
        return
    dim = block_dim(parameter.dims)
    length = parameter.shape[dim]
    yield _stored_tensor(parameter, "", dim, num_codes(parameter.form, length)), _ITEMS[parameter.form]
    if parameter.form != "bfloat16":
        yield _stored_tensor(parameter, SCALES, dim, num_scales(length)), "float32"


def _stored_tensor(parameter: Parameter, ending: str, dim: int, length: int) -> Parameter:
    shape = (*parameter.shape[:dim], length, *parameter.shape[dim + 1 :])
    return replace(parameter, name=parameter.name + ending, shape=shape)


def stored_bytes(parameter: Parameter, width: int) -> int:
    """Stored bytes of a parameter, if unquantized weights take `width` bytes each."""
    return sum(tensor.numel * (ITEM_BYTES[dtype] if dtype else width) for tensor, dtype in stored_tensors(parameter))
