"""RMS norm against its definition: outputs and gradients, in every dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.layers.norm import RMSNorm, rms_norm, rms_norm_reference
from tests.unit.layers.gradients import assert_equal_gradients, outputs_and_gradients


@given(
    shape=st.lists(st.integers(0, 4), max_size=3), width=st.integers(1, 9), one_plus=st.booleans(),
    is_transposed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_outputs_and_gradients_equal_the_reference(
    shape: list[int], width: int, one_plus: bool, is_transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(*shape, width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
    if is_transposed and len(shape) > 1:
        x = x.transpose(0, 1)
    assert_equal_gradients(
        lambda x, w: rms_norm(x, w, 1e-6, one_plus), lambda x, w: rms_norm_reference(x, w, 1e-6, one_plus), x, weight
    )


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_rounded_once(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, narrow = torch.randn(64, 96).bfloat16(), torch.randn(96).to(weight_dtype), torch.bfloat16
    actual = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight, gradient_dtype=narrow)
    exact = outputs_and_gradients(
        lambda x, w: rms_norm_reference(x, w, 1e-6), x.double(), weight.double(), gradient_dtype=narrow
    )
    assert [tensor.dtype for tensor in actual] == [narrow, narrow, weight_dtype]
    for tensor, expected in zip(actual, exact, strict=True):
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=2**-7, atol=1e-3)


def test_the_module_computes_the_function_and_zeros_have_gradients() -> None:
    norm, x = RMSNorm(1e-5, one_plus=True), torch.randn(2, 6)
    norm.weight = torch.nn.Parameter(torch.randn(6))
    torch.testing.assert_close(norm(x), rms_norm(x, norm.weight, 1e-5, True))
    tensors = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), torch.zeros(2, 4), torch.ones(4))
    assert all(tensor.isfinite().all() for tensor in tensors)
