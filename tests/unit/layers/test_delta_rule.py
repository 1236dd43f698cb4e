"""The gated delta rule in chunks against the same step by step: what is read, the state and every gradient."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from moe.layers import delta_rule
from moe.layers.delta_rule import gated_delta_rule, gated_delta_rule_reference, gated_delta_step
from tests.unit.layers.gradients import outputs_and_gradients


def inputs_of(
    rows: int, length: int, of_keys: int, repeats: int, wide: int, short: int, strongest: float, seed: int = 0
) -> list[Tensor]:
    """q, k, v, log decay, beta: keys of length 1, decays from none to `strongest`."""
    torch.manual_seed(seed)
    of_values = of_keys * repeats
    q, k = (torch.randn(rows, length, of_keys, wide, dtype=torch.float64) for _ in range(2))
    v = torch.randn(rows, length, of_values, short, dtype=torch.float64)
    # Spread over magnitudes: some positions keep nearly all, others next to nothing.
    log_decay = -strongest * torch.rand(rows, length, of_values, dtype=torch.float64) ** 4
    beta = torch.rand(rows, length, of_values, dtype=torch.float64)
    return [normalize(q, dim=-1), normalize(k, dim=-1), v, log_decay, beta]


@st.composite
def documents_of(draw: st.DrawFn, rows: int, length: int) -> Tensor | None:
    """Runs of positions, of documents and of padding."""
    if draw(st.booleans()):
        return None
    documents = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < length:
            run = draw(st.one_of(st.integers(1, 4), st.integers(1, max(1, length))))
            row += [draw(st.sampled_from((-1, 0, 1, 2, 3)))] * run
        documents.append(row[:length])
    return torch.tensor(documents)


def run(function: Any, inputs: list[Tensor], documents: Tensor | None, *state: Tensor) -> list[Tensor]:
    def of(*inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs[:5], documents=documents, state=inputs[5] if len(inputs) > 5 else None)

    return outputs_and_gradients(of, *inputs, *state)


@given(
    rows=st.integers(1, 2),
    length=st.integers(1, 40),
    chunk=st.integers(1, 12),
    at_once=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strongest=st.sampled_from((0.0, 1e-3, 1.0, 50.0)),
    has_state=st.booleans(),
    data=st.data(),
)
def test_chunks_give_what_steps_give(
    rows: int,
    length: int,
    chunk: int,
    at_once: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    strongest: float,
    has_state: bool,
    data: st.DataObject,
) -> None:
    inputs = inputs_of(rows, length, *heads, *widths, strongest, seed=data.draw(st.integers(0, 99)))
    documents = data.draw(documents_of(rows, length))
    states = [torch.randn(rows, heads[0] * heads[1], *widths, dtype=torch.float64)] if has_state else []
    with pytest.MonkeyPatch.context() as patch:  # short rows then have several chunks, as long ones do
        patch.setattr(delta_rule, "CHUNK", chunk)
        patch.setattr(delta_rule, "CHUNKS_AT_ONCE", at_once)
        made = run(gated_delta_rule, inputs, documents, *states)
    expected = run(gated_delta_rule_reference, inputs, documents, *states)
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strongest", [1e-4, 50.0])
@pytest.mark.parametrize("has_documents", [False, True])
def test_chunks_of_64(strongest: float, has_documents: bool) -> None:
    inputs = inputs_of(2, 200, 1, 2, 16, 8, strongest)
    documents = None
    if has_documents:
        documents = torch.tensor([[0] * 70 + [1] * 60 + [-1] * 5 + [2] * 65, [-1] * 63 + [5] * 1 + [6] * 136])
    made, expected = (run(each, inputs, documents) for each in (gated_delta_rule, gated_delta_rule_reference))
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


def test_gradcheck() -> None:
    inputs = [each.requires_grad_() for each in inputs_of(1, 7, 1, 2, 2, 3, 5.0)]
    documents = torch.tensor([[0, 0, 0, -1, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda *inputs: gated_delta_rule(*inputs, documents=documents), tuple(inputs))


def test_documents_packed_are_documents_alone() -> None:
    inputs = inputs_of(1, 150, 1, 2, 8, 8, 2.0)
    documents = torch.tensor([[3] * 50 + [-1] * 10 + [4] * 90])
    together, state = gated_delta_rule(*inputs, documents=documents)
    for part in (slice(0, 50), slice(60, 150)):
        alone, state_alone = gated_delta_rule(*(each[:, part] for each in inputs))
        torch.testing.assert_close(together[:, part], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, state_alone, rtol=1e-12, atol=1e-12)
    assert not together[:, 50:60].any()


def test_step_by_step_is_the_whole() -> None:
    inputs = inputs_of(2, 90, 2, 2, 8, 4, 3.0)
    documents = torch.ones(2, 90, dtype=torch.int64)
    documents[1, :20] = -1  # a shorter prompt, aligned at its end
    whole, last = gated_delta_rule(*inputs, documents=documents)
    read, state = gated_delta_rule(*(each[:, :70] for each in inputs), documents=documents[:, :70])
    torch.testing.assert_close(read, whole[:, :70])
    for at in range(70, 90):
        one, state = gated_delta_step(*(each[:, at] for each in inputs), state)
        torch.testing.assert_close(one, whole[:, at])
    torch.testing.assert_close(state, last)


def test_equal_keys_that_write_all() -> None:
    """Powers of the triangular system would have binomial coefficients, which cancel: it is solved by substitution."""
    q, k, v, log_decay, beta = inputs_of(1, 64, 1, 1, 4, 4, 0.0)
    inputs = [q, k[:, :1].expand_as(k).contiguous(), v, log_decay, torch.ones_like(beta)]
    made, expected = (run(each, inputs, None) for each in (gated_delta_rule, gated_delta_rule_reference))
    torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-10)


def test_float32_after_strong_decays() -> None:
    """Sums of decays reach thousands within a chunk; what lies behind the last strong one keeps its digits."""
    inputs = inputs_of(1, 64, 1, 1, 8, 8, 1e-3)
    inputs[3][:, :40] = -50.0
    exact, _ = gated_delta_rule(*inputs)
    made, _ = gated_delta_rule(*(each.float() for each in inputs))
    torch.testing.assert_close(made, exact.float(), rtol=1e-4, atol=1e-5)


def test_narrow_values_are_read_and_the_state_is_wide() -> None:
    inputs = [each.bfloat16() for each in inputs_of(1, 70, 1, 2, 8, 8, 1.0)]
    read, state = gated_delta_rule(*inputs)
    exact, _ = gated_delta_rule(*(each.double() for each in inputs))
    assert (read.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(read, exact.bfloat16(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_one_document_is_as_in_transformers(length: int) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, log_decay, beta = (each.float() for each in inputs_of(2, length, 2, 2, 16, 8, 3.0))
    theirs, their_state = qwen.torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, output_final_state=True)
    ours, state = gated_delta_rule(q * 16**-0.5, k, v, log_decay, beta)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, their_state, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_divide() -> None:
    q, k, v, log_decay, beta = inputs_of(1, 3, 2, 1, 2, 2, 1.0)
    with pytest.raises(ValueError, match="multiple"):
        gated_delta_rule(q, k, v[:, :, :1], log_decay[:, :, :1], beta[:, :, :1])
