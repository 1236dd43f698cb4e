"""Forms in which a frozen matrix is kept: as wide as other weights, narrower, or as codes with a scale a block."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from moe.spec.parameter import Dim, Form, Parameter

CODED: tuple[Form, ...] = ("bfloat16", "int8", "nf4")
"""Forms that are decoded where they are multiplied."""
BLOCK = 64
"""Values that share a scale, one after another along one dimension (QLoRA, arXiv 2305.14314, section 3)."""
SCALES = "_scales"
"""What the name of a matrix's scales ends with; its codes have the name of the matrix."""

ItemDtype = Literal["float32", "bfloat16", "int8", "uint8"]
ITEM_BYTES: dict[ItemDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "uint8": 1}
_ITEMS: dict[Form, ItemDtype] = {"bfloat16": "bfloat16", "int8": "int8", "nf4": "uint8"}
_UNSPLIT: tuple[Dim, ...] = ("model", "vocab", "none")
"""Dimensions that no rank computes with a part of."""


def block_dim(dims: Sequence[Dim]) -> int:
    """The dimension of a matrix that blocks lie along: the last one that a rank always has whole where it multiplies,
    so that no layout changes what shares a scale."""
    return next(dim for dim in reversed(range(len(dims))) if dims[dim] in _UNSPLIT)


def num_codes(form: Form, length: int) -> int:
    """Items that so many values along the blocks' dimension are kept in."""
    return -(-length // 2) if form == "nf4" else length


def num_scales(length: int) -> int:
    """Blocks that so many values lie in."""
    return -(-length // BLOCK)


def kept(parameter: Parameter) -> Iterator[tuple[Parameter, ItemDtype | None]]:
    """The tensors that a parameter is kept as, and the dtype of each; None is that of all weights.

    Codes, of which two of nf4 lie in one byte, and a scale for each block. They are split as the parameter is.
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
    """Bytes of a parameter as it is kept, where other weights take `width` bytes each."""
    return sum(tensor.numel * (ITEM_BYTES[dtype] if dtype else width) for tensor, dtype in kept(parameter))
