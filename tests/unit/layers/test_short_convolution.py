"""The short convolution against its definition: alone, in documents and token by token."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.layers.short_convolution import short_convolution, short_convolution_reference
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


def test_bfloat16_is_rounded_once() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 30, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    exact = short_convolution(x.double(), weight.double())
    torch.testing.assert_close(short_convolution(x, weight), exact.bfloat16(), rtol=2**-7, atol=1e-6)
