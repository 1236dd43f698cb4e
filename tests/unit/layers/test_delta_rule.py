"""The gated delta rule in chunks against a step-by-step reference: outputs, state and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from moe.layers import chunks
from moe.layers.delta_rule import gated_delta_rule, gated_delta_rule_reference
from tests.unit.layers.gradients import assert_equal_gradients, document_runs


def inputs_of(
    rows: int, length: int, key_heads: int, repeats: int, wide: int, short: int, strongest: float, seed: int = 0
) -> list[Tensor]:
    """q, k, v, log decay, beta: keys of length 1, decays from none to `strongest`."""
    torch.manual_seed(seed)
    value_heads = key_heads * repeats
    q, k = (torch.randn(rows, length, key_heads, wide, dtype=torch.float64) for _ in range(2))
    v = torch.randn(rows, length, value_heads, short, dtype=torch.float64)
    # Spread over magnitudes: some positions keep nearly everything, others almost nothing.
    log_decay = -strongest * torch.rand(rows, length, value_heads, dtype=torch.float64) ** 4
    beta = torch.rand(rows, length, value_heads, dtype=torch.float64)
    return [normalize(q, dim=-1), normalize(k, dim=-1), v, log_decay, beta]


def assert_equal(inputs: list[Tensor], documents: Tensor | None, *state: Tensor) -> None:
    """Chunks and steps give the same outputs, state and gradients."""

    def with_documents(function: Any) -> Any:
        return lambda q, k, v, decay, beta, state=None: function(q, k, v, decay, beta, documents=documents, state=state)

    functions = with_documents(gated_delta_rule), with_documents(gated_delta_rule_reference)
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


def test_equal_keys_with_full_beta() -> None:
    """The system is solved by substitution: powers of its triangular matrix would have binomial coefficients, which
    cancel."""
    q, k, v, log_decay, beta = inputs_of(1, 64, 1, 1, 4, 4, 0.0)
    assert_equal([q, k[:, :1].expand_as(k).contiguous(), v, log_decay, torch.ones_like(beta)], None)


def test_float32_after_strong_decays() -> None:
    """Sums of decays reach thousands within a chunk; values after the last strong decay keep their precision."""
    inputs = inputs_of(1, 64, 1, 1, 8, 8, 1e-3)
    inputs[3][:, :40] = -50.0
    exact, _ = gated_delta_rule(*inputs)
    narrow, _ = gated_delta_rule(*(tensor.float() for tensor in inputs))
    torch.testing.assert_close(narrow, exact.float(), rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_have_a_float32_state() -> None:
    inputs = [tensor.bfloat16() for tensor in inputs_of(1, 70, 1, 2, 8, 8, 1.0)]
    outputs, state = gated_delta_rule(*inputs)
    exact, _ = gated_delta_rule(*(tensor.double() for tensor in inputs))
    assert (outputs.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(outputs, exact.bfloat16(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_one_document_is_as_in_transformers(length: int) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, log_decay, beta = (tensor.float() for tensor in inputs_of(2, length, 2, 2, 16, 8, 3.0))
    expected = qwen.torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, output_final_state=True)
    actual = gated_delta_rule(q * 16**-0.5, k, v, log_decay, beta)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, v, log_decay, beta = inputs_of(1, 3, 2, 1, 2, 2, 1.0)
    with pytest.raises(ValueError, match="multiple"):
        gated_delta_rule(q, k, v[:, :, :1], log_decay[:, :, :1], beta[:, :, :1])
