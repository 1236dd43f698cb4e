"""State-space duality in chunks against a step-by-step reference: outputs, state and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.layers import chunks
from moe.layers.state_space import state_space, state_space_reference
from tests.unit.layers.gradients import assert_equal_gradients, document_runs


def inputs_of(
    rows: int, length: int, groups: int, repeats: int, wide: int, short: int, strongest: float, seed: int = 0
) -> list[Tensor]:
    """c, b, x, log decay: decays from none to `strongest`."""
    torch.manual_seed(seed)
    c, b = (torch.randn(rows, length, groups, wide, dtype=torch.float64) for _ in range(2))
    x = torch.randn(rows, length, groups * repeats, short, dtype=torch.float64)
    # Spread over magnitudes: some positions keep nearly everything, others almost nothing.
    return [c, b, x, -strongest * torch.rand(rows, length, groups * repeats, dtype=torch.float64) ** 4]


def assert_equal(inputs: list[Tensor], documents: Tensor | None, *state: Tensor) -> None:
    """Chunks and steps give the same outputs, state and gradients."""

    def with_documents(function: Any) -> Any:
        return lambda c, b, x, decay, state=None: function(c, b, x, decay, documents=documents, state=state)

    functions = with_documents(state_space), with_documents(state_space_reference)
    assert_equal_gradients(*functions, *inputs, *state, tolerance=1e-10)


@given(
    rows=st.integers(1, 2), length=st.integers(1, 40), chunk=st.integers(1, 12), at_once=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)), widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strongest=st.sampled_from((0.0, 1e-3, 1.0, 50.0)), has_state=st.booleans(), data=st.data(),
)  # fmt: skip
def test_chunks_equal_steps(
    rows: int, length: int, chunk: int, at_once: int, heads: tuple[int, int], widths: tuple[int, int],
    strongest: float, has_state: bool, data: st.DataObject,
) -> None:  # fmt: skip
    inputs = inputs_of(rows, length, *heads, *widths, strongest, seed=data.draw(st.integers(0, 99)))
    states = [torch.randn(rows, heads[0] * heads[1], *widths, dtype=torch.float64)] if has_state else []
    with pytest.MonkeyPatch.context() as patch:  # gives short rows several chunks
        patch.setattr(chunks, "CHUNK", chunk)
        patch.setattr(chunks, "CHUNKS_AT_ONCE", at_once)
        assert_equal(inputs, data.draw(document_runs(rows, length)), *states)


@pytest.mark.parametrize("strongest", [1e-4, 50.0])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_of_64_equal_steps(strongest: float, has_documents: bool) -> None:
    documents = torch.tensor([[0] * 70 + [1] * 60 + [-1] * 5 + [2] * 65, [-1] * 63 + [5] * 1 + [6] * 136])
    assert_equal(inputs_of(2, 200, 1, 2, 16, 8, strongest), documents if has_documents else None)


def test_bfloat16_inputs_have_a_float32_state() -> None:
    inputs = [tensor.bfloat16() for tensor in inputs_of(1, 70, 1, 2, 8, 8, 1.0)]
    outputs, state = state_space(*inputs)
    exact, _ = state_space(*(tensor.double() for tensor in inputs))
    assert (outputs.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(outputs, exact.bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_one_document_is_as_in_transformers(length: int) -> None:
    """Their x is not yet multiplied by time steps, and their state is transposed."""
    granite = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    c, b, x, _ = (tensor.float() for tensor in inputs_of(2, length, 2, 2, 16, 8, 3.0))
    steps, decay = torch.rand(2, length, 4), -torch.rand(4)
    expected, state = granite.mamba2_chunk_scan(x, steps, decay, b, c, chunk_size=32, return_final_states=True)
    outputs, own_state = state_space(c, b, x * steps[..., None], decay * steps)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own_state, state.transpose(-1, -2), rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_are_refused() -> None:
    c, b, x, log_decay = inputs_of(1, 3, 2, 1, 2, 2, 1.0)
    with pytest.raises(ValueError, match="multiple"):
        state_space(c, b, x[:, :, :1], log_decay[:, :, :1])
