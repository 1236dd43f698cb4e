"""The grouped product against one expert after another: outputs, every gradient, and the corners."""

import pytest
import torch

from moe.experts import feed_forward_reference, grouped_feed_forward

CASES = {
    "even": [3, 3, 3, 3],
    "an expert without tokens": [5, 0, 6, 1],
    "all to one": [0, 0, 12, 0],
    "one token": [0, 1, 0, 0],
    "no tokens": [0, 0, 0, 0],
}


def tensors(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), 6), (len(counts), 6, 10), (len(counts), 10, 6)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
def test_equals_the_reference(counts: list[int], dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = tensors(counts, dtype), tensors(counts, torch.float64)
    theirs = [t.detach().to(dtype).double().requires_grad_() for t in theirs]
    y, expected = grouped_feed_forward(*ours, counts), feed_forward_reference(*theirs, counts)
    scale = 1 + expected.detach().abs().max() if expected.numel() else 1
    assert y.dtype == dtype
    torch.testing.assert_close(y.double() / scale, expected / scale, rtol=0, atol=tolerance)
    gradient = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y.backward(gradient.to(dtype))
    expected.backward(gradient.to(dtype).double())
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.grad is not None, "an expert without tokens has a gradient of zeros"
        size = 1 + (reference.grad.abs().max() if reference.grad.numel() else 0)
        torch.testing.assert_close(mine.grad.double() / size, reference.grad / size, rtol=0, atol=tolerance)


def test_gradients_against_finite_differences() -> None:
    counts = [2, 0, 3]
    assert torch.autograd.gradcheck(
        lambda *given: grouped_feed_forward(*given, counts), tensors(counts, torch.float64)
    )


def test_input_and_gradient_need_not_be_contiguous() -> None:
    counts = [3, 3, 3, 3]
    _, w_in, w_out = tensors(counts, torch.float64)
    strided = torch.randn(12, 12, dtype=torch.float64)[:, ::2].requires_grad_()
    y = grouped_feed_forward(strided, w_in, w_out, counts)
    torch.testing.assert_close(y, feed_forward_reference(strided, w_in, w_out, counts))
    y.sum().backward()  # its gradient has stride 0
    other = strided.detach().clone().requires_grad_()
    feed_forward_reference(other, w_in.detach(), w_out.detach(), counts).sum().backward()
    torch.testing.assert_close(strided.grad, other.grad)
