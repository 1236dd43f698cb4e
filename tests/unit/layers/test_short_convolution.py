"""The short convolution against its definition, alone, in documents and token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.short_convolution import convolution_cache, short_convolution, short_convolution_reference
from tests.unit.layers.gradients import outputs_and_gradients


@st.composite
def documents_of(draw: st.DrawFn, rows: int, length: int) -> Tensor | None:
    row = st.lists(st.integers(-1, 2), min_size=length, max_size=length).map(sorted)
    return torch.tensor([draw(row) for _ in range(rows)]) if draw(st.booleans()) else None


@given(
    rows=st.integers(1, 2), length=st.integers(1, 9), width=st.integers(1, 5), has_before=st.booleans(), data=st.data()
)
def test_outputs_and_gradients_are_the_reference_s(
    rows: int, length: int, width: int, has_before: bool, data: st.DataObject
) -> None:
    documents = data.draw(documents_of(rows, length))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in ((rows, length, 3), (3, width))]
    if has_before:
        inputs.append(torch.randn(rows, width - 1, 3, dtype=torch.float64))
    made, expected = (
        outputs_and_gradients(lambda x, w, before=None: function(x, w, documents, before), *inputs)  # noqa: B023
        for function in (short_convolution, short_convolution_reference)
    )
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_in_parts_is_the_whole(cut: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 3), torch.randn(3, 4)
    documents = torch.tensor([[-1, -1, 0, 0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4, 4]])
    whole = short_convolution(x, weight, documents)
    cache = convolution_cache(x[:, :cut], 4, documents[:, :cut])
    torch.testing.assert_close(short_convolution(x[:, :cut], weight, documents[:, :cut]), whole[:, :cut])
    if cut != 2:  # behind padding the row's first document begins, and elsewhere it goes on
        rest = short_convolution(x[1:, cut:], weight, documents[1:, cut:], cache[1:])
        torch.testing.assert_close(rest, whole[1:, cut:])
    for at in range(cut, 6):
        one = short_convolution(x[:, at : at + 1], weight, before=cache)
        cache = convolution_cache(x[:, at : at + 1], 4, before=cache)
        if cut > 1:  # the first row's padding is behind it
            torch.testing.assert_close(one[:, 0], whole[:, at])
        torch.testing.assert_close(one[1, 0], whole[1, at])


def test_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 30, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    exact = short_convolution(x.double(), weight.double())
    torch.testing.assert_close(short_convolution(x, weight), exact.bfloat16(), rtol=2**-7, atol=1e-6)
