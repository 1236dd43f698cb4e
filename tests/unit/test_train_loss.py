"""The chunked loss against torch's own on whole logits: values and every gradient."""

import pytest
import torch
from torch.nn import functional

from moe.layers.nll import smoothed_nll


def case(vocabulary, rows, length, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    table = torch.randn(vocabulary, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(4, vocabulary, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = 0
    return hidden, table, labels


def whole(hidden, table, labels, smoothing):
    return functional.cross_entropy(
        (hidden @ table.t()).flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum",
        label_smoothing=smoothing,
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("vocabulary", "rows"), [(11, 3), (70_000, 3), (4096, 40)])
def test_equals_whole_logits(vocabulary, rows, smoothing):
    hidden, table, labels = case(vocabulary, rows, length=5)
    smoothed, nll = smoothed_nll(hidden, table, labels, smoothing, 0)
    (2.5 * smoothed).backward()
    found = [smoothed.detach(), nll, hidden.grad, table.grad]
    hidden.grad = table.grad = None
    expected = whole(hidden, table, labels, smoothing)
    (2.5 * expected).backward()
    plain = whole(hidden.detach(), table.detach(), labels, 0.0)
    torch.testing.assert_close(found, [expected.detach(), plain, hidden.grad, table.grad])
    assert not nll.requires_grad


def test_padding_has_no_gradient_and_all_padding_no_loss():
    hidden, table, labels = case(50, 4, 5)
    smoothed_nll(hidden, table, labels, 0.1, 0)[0].backward()
    assert not hidden.grad[labels == 0].any()
    assert hidden.grad[labels != 0].any(dim=-1).all()
    for rows in (4, 0):
        hidden, table, labels = case(50, rows, 5)
        smoothed, nll = smoothed_nll(hidden, table, torch.zeros_like(labels), 0.1, 0)
        smoothed.backward()
        assert float(smoothed.detach()) == float(nll) == 0
        assert not hidden.grad.any()
        assert not table.grad.any()


@pytest.mark.parametrize("frozen", ["table", "hidden", "both"])
def test_what_is_frozen_has_no_gradient_and_the_other_its_own(frozen):
    hidden, table, labels = case(50, 4, 5)
    hidden.requires_grad_(frozen == "table")
    table.requires_grad_(frozen == "hidden")
    smoothed, _ = smoothed_nll(hidden, table, labels, 0.1, 0)
    expected = whole(hidden, table, labels, 0.1)
    torch.testing.assert_close(smoothed, expected)
    assert smoothed.requires_grad == (frozen != "both")
    trained = [each for each in (hidden, table) if each.requires_grad]
    for each in trained:
        torch.testing.assert_close(torch.autograd.grad(smoothed, each), torch.autograd.grad(expected, each))


def test_bfloat16_sums_in_float32():
    hidden, table, labels = case(4096, 20, 5)
    exact = whole(hidden, table, labels, 0.1).detach()
    narrow, wide = (hidden.detach().to(torch.bfloat16).requires_grad_(), table.detach().float().requires_grad_())
    smoothed, _ = smoothed_nll(narrow, wide, labels, 0.1, 0)
    smoothed.backward()
    assert (smoothed.dtype, narrow.grad.dtype, wide.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(smoothed.double().detach(), exact, rtol=5e-3, atol=0)
