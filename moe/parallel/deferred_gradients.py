"""Gradients of weights apart from those of inputs, for zero-bubble schedules (arXiv 2401.10241, section 3.1).

Earlier pipeline stages wait for the gradient of a stage's input, but no stage waits for those of weights. So the
autograd functions that multiply by a weight defer the product that is its gradient, as DualPipe's do (arXiv
2412.19437). Autograd cannot split a graph itself: it would run each function of ours twice, all-to-alls included.
Gradients that are not deferred (of norms, biases, embeddings, routers) are few products; the pass of inputs computes
them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moe.parallel.buffers import GradBuffer


class DeferredGradients:
    """Gradients of weights from one stage and micro-batch, deferred in its backward pass until `compute`.

    They are bit by bit those of a whole backward pass, except that uses of a weight within the micro-batch may be
    summed in another order. What they are computed from is kept until then.
    """

    def __init__(self) -> None:
        self._computations = deque[Callable[[], None]]()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Context of the forward pass, and of the backward pass whose gradients of weights are deferred."""
        global _active
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before

    def add(self, parameter: Tensor, compute: Callable[[], Tensor | None]) -> None:
        """Defer `compute`, which returns the parameter's gradient, or None if it has added it to `grad` itself."""
        self._computations.append(lambda: _accumulate(parameter, compute()))

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the deferred gradients and add them to `grad`, freeing what each is computed from."""
        while self._computations:
            self._computations.popleft()()


_active: DeferredGradients | None = None
"""A variable of the module, not of a context: autograd runs backward passes of a GPU in threads of its own."""


def deferred_gradients(parameter: Tensor) -> DeferredGradients | None:
    """Deferred gradients that take that of `parameter`; None if it is computed at once. That of an intermediate result
    always is, since the backward pass goes on from it."""
    return _active if _active is not None and parameter.is_leaf and parameter.requires_grad else None


def weight_gradient(parameter: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """Gradient of a weight, for autograd, by `compute`; None if it is deferred, or was added to `grad` in place."""

    def write() -> Tensor | None:
        buffer = GradBuffer(parameter)
        buffer.write(compute())
        return buffer.to_autograd()

    if (deferred := deferred_gradients(parameter)) is None:
        return write()
    deferred.add(parameter, write)
    return None


def _accumulate(parameter: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient to `grad`, as autograd does."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
