"""Operands of the products' weights: pointers, or tensor descriptors for the tensor memory accelerator (TMA) of
sm_90 and later."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.configs import Config

Loads = Literal["pointers", "tma", "tma_transposed"]
"""How a kernel loads weights (`moe.kernels.tiles.weight_tile`)."""
_ALIGNMENT = 16
"""Bytes that divide the address and the strides of a descriptor's tensor."""


def weight_operands(matrices: Sequence[Tensor], config: Config) -> tuple[list[Tensor | TensorDescriptor], Loads]:
    """(operands, how to load them) for `matrices` `[E, inner, columns]` that one kernel multiplies by: descriptors if
    `config` uses TMA and it can load all of them, which must then have the same memory order; else the matrices."""
    if config.uses_tma:
        if all(_is_loadable(matrix) for matrix in matrices):
            block = [1, config.block_inner, config.block_columns]
            return [TensorDescriptor.from_tensor(matrix, block) for matrix in matrices], "tma"
        transposed = [matrix.transpose(1, 2) for matrix in matrices]
        if all(_is_loadable(matrix) for matrix in transposed):
            block = [1, config.block_columns, config.block_inner]
            return [TensorDescriptor.from_tensor(matrix, block) for matrix in transposed], "tma_transposed"
    return [*matrices], "pointers"


def _is_loadable(matrix: Tensor) -> bool:
    """Whether a descriptor can have this memory order."""
    *strides, last_stride = matrix.stride()
    addresses = (matrix.data_ptr(), *(stride * matrix.itemsize for stride in strides))
    return last_stride == 1 and matrix.numel() > 0 and all(address % _ALIGNMENT == 0 for address in addresses)
