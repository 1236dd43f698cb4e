"""The chunked loss against torch's own on unchunked logits: values and every gradient."""

import pytest
import torch
from torch.nn import functional

from moe.layers.nll import smoothed_nll


def case(vocabulary, rows, length, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(rows, length, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    table = torch.randn(vocabulary, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(4, vocabulary, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = 0
    return hidden_states, table, labels


def full_loss(hidden_states, table, labels, smoothing, cap=None):
    logits = hidden_states @ table.t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum", label_smoothing=smoothing
    )


@pytest.mark.parametrize("projects_all", [False, True])
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, None), (0.1, None), (0.1, 2.0)])
@pytest.mark.parametrize(("vocabulary", "rows"), [(11, 3), (70_000, 3), (4096, 40)])
def test_equals_whole_logits(vocabulary, rows, smoothing, cap, projects_all):
    hidden_states, table, labels = case(vocabulary, rows, length=5)
    loss, nll = smoothed_nll(hidden_states, table, labels, smoothing, 0, projects_all=projects_all, cap=cap)
    (2.5 * loss).backward()
    actual = [loss.detach(), nll, hidden_states.grad, table.grad]
    hidden_states.grad = table.grad = None
    expected = full_loss(hidden_states, table, labels, smoothing, cap)
    (2.5 * expected).backward()
    plain = full_loss(hidden_states.detach(), table.detach(), labels, 0.0, cap)
    torch.testing.assert_close(actual, [expected.detach(), plain, hidden_states.grad, table.grad])
    assert not nll.requires_grad


@pytest.mark.parametrize("projects_all", [False, True])
def test_padding_has_no_gradient_and_all_padding_no_loss(projects_all):
    hidden_states, table, labels = case(50, 4, 5)
    smoothed_nll(hidden_states, table, labels, 0.1, 0, projects_all=projects_all)[0].backward()
    assert not hidden_states.grad[labels == 0].any()
    assert hidden_states.grad[labels != 0].any(dim=-1).all()
    for rows in (4, 0):
        hidden_states, table, labels = case(50, rows, 5)
        loss, nll = smoothed_nll(hidden_states, table, torch.zeros_like(labels), 0.1, 0, projects_all=projects_all)
        loss.backward()
        assert float(loss.detach()) == float(nll) == 0
        assert not hidden_states.grad.any()
        assert not table.grad.any()


@pytest.mark.parametrize("frozen_input", ["table", "hidden", "both"])
def test_what_is_frozen_has_no_gradient_and_the_other_its_own(frozen_input):
    hidden_states, table, labels = case(50, 4, 5)
    hidden_states.requires_grad_(frozen_input == "table")
    table.requires_grad_(frozen_input == "hidden")
    loss, _ = smoothed_nll(hidden_states, table, labels, 0.1, 0)
    expected = full_loss(hidden_states, table, labels, 0.1)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == (frozen_input != "both")
    inputs = [tensor for tensor in (hidden_states, table) if tensor.requires_grad]
    for tensor in inputs:
        torch.testing.assert_close(torch.autograd.grad(loss, tensor), torch.autograd.grad(expected, tensor))


def test_bfloat16_sums_in_float32():
    hidden_states, table, labels = case(4096, 20, 5)
    exact = full_loss(hidden_states, table, labels, 0.1).detach()
    narrow, wide = (hidden_states.detach().to(torch.bfloat16).requires_grad_(), table.detach().float().requires_grad_())
    loss, _ = smoothed_nll(narrow, wide, labels, 0.1, 0)
    loss.backward()
    assert (loss.dtype, narrow.grad.dtype, wide.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss.double().detach(), exact, rtol=5e-3, atol=0)
