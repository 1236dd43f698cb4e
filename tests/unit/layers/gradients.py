"""Outputs and gradients of functions of tensors, to compare functions, and random documents."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor


def outputs_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor, gradient_dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Outputs of `function`, then the gradients of its inputs for fixed random gradients of the outputs, which
    `gradient_dtype` can represent."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    draws = torch.Generator().manual_seed(7)
    upstream = [torch.randn(output.shape, generator=draws, dtype=torch.float64).to(output.device) for output in outputs]
    zero = sum(tensor.sum() * 0 for tensor in inputs)  # gives a function of constants a gradient, too
    loss = zero + sum((y * d_y.to(gradient_dtype).to(y.dtype)).sum() for y, d_y in zip(outputs, upstream, strict=True))
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
    return [*(output.detach() for output in outputs), *zeros]


def assert_equal_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: Tensor,
    tolerance: float = 1e-12,
) -> None:
    """Outputs and gradients of both functions agree."""
    actual, expected = (outputs_and_gradients(compute, *inputs) for compute in (function, reference))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@st.composite
def document_runs(draw: st.DrawFn, rows: int, length: int) -> Tensor | None:
    """Document ids of positions: runs of documents and of padding (-1); None for one document."""
    if draw(st.booleans()):
        return None
    documents = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < length:
            run = draw(st.one_of(st.integers(1, 4), st.integers(1, length)))
            row += [draw(st.sampled_from((-1, 0, 1, 2, 3)))] * run
        documents.append(row[:length])
    return torch.tensor(documents)
