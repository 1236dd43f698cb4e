"""RMS norm against its definition: outputs and gradients, in every dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.norm import RMSNorm, rms_norm, rms_norm_reference
from tests.unit.layers.gradients import outputs_and_gradients


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    width=st.integers(1, 9),
    one_plus=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_the_reference_s(
    shape: list[int], width: int, one_plus: bool, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(*shape, width, dtype=torch.float64)
    if transposed and len(shape) > 1:
        x = x.transpose(0, 1)
    weight = torch.randn(width, dtype=torch.float64)

    def given_by(norm: object) -> list[Tensor]:
        return outputs_and_gradients(lambda x, w: norm(x, w, 1e-6, one_plus), x, weight)  # type: ignore[operator]

    torch.testing.assert_close(given_by(rms_norm), given_by(rms_norm_reference), rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, True), (x, weight))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_is_rounded_once(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 96).bfloat16()
    weight = torch.randn(96).to(weight_dtype)
    made = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight, given=torch.bfloat16)
    exact = outputs_and_gradients(
        lambda x, w: rms_norm_reference(x, w, 1e-6), x.double(), weight.double(), given=torch.bfloat16
    )
    assert [each.dtype for each in made] == [torch.bfloat16, torch.bfloat16, weight_dtype]
    for one, other in zip(made, exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=2**-7, atol=1e-3)


def test_the_module_is_the_function() -> None:
    norm = RMSNorm(1e-5, one_plus=True)
    norm.weight = torch.nn.Parameter(torch.randn(6))
    x = torch.randn(2, 6)
    torch.testing.assert_close(norm(x), rms_norm(x, norm.weight, 1e-5, True))


def test_a_row_of_zeros_has_gradients() -> None:
    made = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), torch.zeros(2, 4), torch.ones(4))
    assert all(each.isfinite().all() for each in made)
