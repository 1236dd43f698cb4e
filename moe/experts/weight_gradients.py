"""Gradients of expert weights, summed chunk by chunk."""

from collections.abc import Callable, Sequence

from torch import Tensor

from moe.experts.products import GroupedProducts
from moe.parallel import GradBuffer, deferred_gradients


class WeightGradient:
    """Gradient of one expert weight, to which products are added at once, or when it is computed if it is deferred."""

    def __init__(self, parameter: Tensor, *, sums_chunks: bool) -> None:
        self._parameter, self._sums_chunks = parameter, sums_chunks
        self._deferred = deferred_gradients(parameter)
        self._buffer = None if self._deferred is not None else self._new_buffer()
        self._writes: list[Callable[[GradBuffer], None]] = []

    def add(self, write: Callable[[GradBuffer], None]) -> None:
        """Add what `write` writes to a buffer. Tensors that it uses must not change afterwards."""
        if self._buffer is None:
            self._writes.append(write)
        else:
            write(self._buffer)

    def to_autograd(self) -> Tensor | None:
        """The gradient for autograd; None if it was accumulated in place, or is deferred."""
        if self._deferred is None:
            assert self._buffer is not None
            return self._buffer.to_autograd()
        self._deferred.add(self._parameter, self._compute)
        return None

    def _compute(self) -> Tensor | None:
        buffer = self._new_buffer()
        while self._writes:
            self._writes.pop(0)(buffer)
        return buffer.to_autograd()

    def _new_buffer(self) -> GradBuffer:
        return GradBuffer(self._parameter, sums_chunks=self._sums_chunks)


class WeightGradients:
    """Gradients of expert weights, filled chunk by chunk; frozen weights have none."""

    def __init__(self, parameters: Sequence[Tensor | None], *, sums_chunks: bool = False) -> None:
        self._gradients = [
            None
            if parameter is None or not parameter.requires_grad
            else WeightGradient(parameter, sums_chunks=sums_chunks)
            for parameter in parameters
        ]
        (
            self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate,
            self.in_lora_a, self.in_lora_b, self.gate_lora_b, self.out_lora_a, self.out_lora_b, *_,
        ) = self._gradients  # fmt: skip

    def to_autograd(self) -> tuple[Tensor | None, ...]:
        """Gradients for autograd, in the order of `parameters`."""
        return tuple(None if gradient is None else gradient.to_autograd() for gradient in self._gradients)


def write_product(products: GroupedProducts, x: Tensor, d_y: Tensor, counts: list[int], buffer: GradBuffer) -> None:
    """Write x transposed · d_y over each expert's rows to the buffer, or add it."""
    buffer.set_sum(products.weight_gradient(x, d_y, counts, buffer.tensor, adds=buffer.adds))
