"""Access of kernels to weights: by pointers, or by tensor descriptors for the tensor memory accelerator (TMA) of sm_90
and later."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.configs import Config

WeightAccess = Literal["pointers", "tma", "tma_transposed"]
"""How a kernel loads weights (`moe.kernels.tiles.weight_tile`)."""
_ALIGNMENT = 16
"""Alignment in bytes of a descriptor's address and strides."""


def weight_operands(matrices: Sequence[Tensor], config: Config) -> tuple[list[Tensor | TensorDescriptor], WeightAccess]:
    """Return a kernel's operands for the weights `matrices` `[E, inner, columns]`, and how it loads them. They are
    descriptors if `config` uses TMA, every matrix is aligned and all have one memory order; else the matrices."""
    if config.uses_tma:
        if all(is_loadable(matrix) for matrix in matrices):
            block = [1, config.block_inner, config.block_columns]
            return [TensorDescriptor.from_tensor(matrix, block) for matrix in matrices], "tma"
        transposed_matrices = [matrix.transpose(1, 2) for matrix in matrices]
        if all(is_loadable(matrix) for matrix in transposed_matrices):
            block = [1, config.block_columns, config.block_inner]
            return [TensorDescriptor.from_tensor(matrix, block) for matrix in transposed_matrices], "tma_transposed"
    return [*matrices], "pointers"


def is_loadable(matrix: Tensor) -> bool:
    """Whether a descriptor can have this memory order."""
    *strides, last_stride = matrix.stride()
    addresses = (matrix.data_ptr(), *(stride * matrix.itemsize for stride in strides))
    is_aligned = all(address % _ALIGNMENT == 0 for address in addresses)
    return last_stride == 1 and min(strides) > 0 and matrix.numel() > 0 and is_aligned
