"""Which operands the products' weights become."""

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe.kernels.configs import Config
from moe.kernels.descriptors import weight_operands
from tests.kernels.cases import DEVICE

TMA = Config(64, 32, 16, 4, 2, uses_tma=True)


def matrix(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


ALIGNED, TRANSPOSED = matrix(3, 24, 40), matrix(3, 40, 24).transpose(1, 2)


def test_matrices_become_descriptors_of_their_memory_order() -> None:
    (first, second), loads = weight_operands([ALIGNED, ALIGNED], TMA)
    assert isinstance(first, TensorDescriptor)
    assert (loads, list(first.shape), first.block_shape) == ("tma", [3, 24, 40], [1, 16, 32])
    assert second.base is ALIGNED  # type: ignore[union-attr]
    (operand,), loads = weight_operands([TRANSPOSED], TMA)
    assert isinstance(operand, TensorDescriptor)
    assert (loads, list(operand.shape), operand.block_shape) == ("tma_transposed", [3, 40, 24], [1, 32, 16])


@pytest.mark.parametrize(
    "matrices",
    [
        [matrix(3, 24, 20)], [matrix(3, 24, 41)[:, :, 1:]], [matrix(3, 24, 80)[:, :, ::2]], [ALIGNED, TRANSPOSED],
        [ALIGNED, matrix(3, 24, 20)], [matrix(3, 0, 40)], [matrix(1, 24, 40).expand(3, 24, 40)],
    ],
    ids=["stride", "address", "no contiguous dimension", "two orders", "one of two", "empty", "expanded"],
)  # fmt: skip
def test_matrices_that_descriptors_cannot_load_remain(matrices: list[Tensor]) -> None:
    operands, loads = weight_operands(matrices, TMA)
    assert loads == "pointers"
    assert all(operand is matrix for operand, matrix in zip(operands, matrices, strict=True))


def test_wide_operands_are_aligned_by_bytes() -> None:
    assert weight_operands([matrix(3, 24, 20, dtype=torch.float32)], TMA)[1] == "tma"


def test_pointers_are_the_default() -> None:
    assert weight_operands([ALIGNED], Config(64, 32, 16, 4, 2))[1] == "pointers"
