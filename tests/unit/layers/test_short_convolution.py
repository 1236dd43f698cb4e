"""The short convolution against its definition: alone, in documents and token by token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.layers.short_convolution import convolution_cache, short_convolution, short_convolution_reference
from tests.unit.layers.gradients import assert_equal_gradients, document_runs


@given(
    rows=st.integers(1, 2), length=st.integers(1, 9), width=st.integers(1, 5), has_before=st.booleans(), data=st.data()
)
def test_outputs_and_gradients_equal_the_reference(
    rows: int, length: int, width: int, has_before: bool, data: st.DataObject
) -> None:
    documents = data.draw(document_runs(rows, length))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shapes = [(rows, length, 3), (3, width), *[(rows, width - 1, 3)] * has_before]
    assert_equal_gradients(
        lambda x, w, before=None: short_convolution(x, w, documents, before),
        lambda x, w, before=None: short_convolution_reference(x, w, documents, before),
        *(torch.randn(shape, dtype=torch.float64) for shape in shapes),
    )


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_a_row_in_parts_equals_the_whole(cut: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 3), torch.randn(3, 4)
    documents = torch.tensor([[-1, -1, 0, 0, 0, 0, 1, 1, 1], [4, 4, 4, 4, 4, 4, 4, 4, 4]])
    whole = short_convolution(x, weight, documents)
    cache = convolution_cache(x[:, :cut], 4, documents[:, :cut])
    torch.testing.assert_close(short_convolution(x[:, :cut], weight, documents[:, :cut]), whole[:, :cut])
    if cut != 2:  # after padding the row's first document begins, and elsewhere it continues
        rest = short_convolution(x[1:, cut:], weight, documents[1:, cut:], cache[1:])
        torch.testing.assert_close(rest, whole[1:, cut:])
    for at in range(cut, 6):
        one = short_convolution(x[:, at : at + 1], weight, before=cache)
        cache = convolution_cache(x[:, at : at + 1], 4, before=cache)
        first_row = int(cut == 1)  # the first row still has padding
        torch.testing.assert_close(one[first_row:, 0], whole[first_row:, at])


def test_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 30, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    exact = short_convolution(x.double(), weight.double())
    torch.testing.assert_close(short_convolution(x, weight), exact.bfloat16(), rtol=2**-7, atol=1e-6)
