"""Outputs and gradients of a function of tensors, to compare two functions by."""

from collections.abc import Callable

import torch
from torch import Tensor


def outputs_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor, given: torch.dtype = torch.float64
) -> list[Tensor]:
    """Outputs of `function`, then the gradients of its inputs where each output meets the same random vector, which
    `given` can hold."""
    inputs = tuple(each.detach().requires_grad_() for each in inputs)
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    draws = torch.Generator().manual_seed(7)
    towards = [torch.randn(each.shape, generator=draws, dtype=torch.float64).to(each.device) for each in outputs]
    towards = [each.to(given) for each in towards]
    unused = sum(each.sum() * 0 for each in inputs)  # a function of constants alone has a gradient too
    loss = unused + sum((one * other.to(one.dtype)).sum() for one, other in zip(outputs, towards, strict=True))
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
    return [*(each.detach() for each in outputs), *zeros]
