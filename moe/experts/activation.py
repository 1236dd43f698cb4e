"""Activations between an expert's matrices, forward and backward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


class Activation(ABC):
    """Computes hidden states from the products of the first matrices, `up` `[n, H]` and, if gated, `gate` `[n, H]`,
    else None."""

    name: ClassVar[str]
    is_gated: ClassVar[bool] = False
    settings: tuple[float, ...] = ()
    """Constructor arguments."""

    @abstractmethod
    def differentiable_forward(self, up: Tensor, gate: Tensor) -> Tensor:
        """Hidden states by differentiable operations; `gate` is ignored if not gated."""

    def prepare_up(self, up: Tensor) -> Tensor:
        """Return the value of `up` that the methods below expect, overwriting `up` if nothing else of it is needed."""
        return up

    @abstractmethod
    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """Hidden states `[n, H]`."""

    def recompute(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(hidden states, activated gate), recomputed in the backward pass."""
        return self.forward(up, gate), None

    @abstractmethod
    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, gate_activation: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(gradient of up, gradient of gate). May overwrite `d_hidden` and the results of `recompute`."""


class ReLU(Activation):
    """max(up, 0): GShard's experts (arXiv 2006.16668, section 2.1)."""

    name = "relu"

    def differentiable_forward(self, up: Tensor, gate: Tensor) -> Tensor:
        return functional.relu(up)

    def prepare_up(self, up: Tensor) -> Tensor:
        return up.relu_()

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return up

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, gate_activation: Tensor | None
    ) -> tuple[Tensor, None]:
        return _aten.threshold_backward(d_hidden, up, 0), None


class SquaredReLU(Activation):
    """max(up, 0)² (Primer, arXiv 2109.08668)."""

    name = "relu2"

    def differentiable_forward(self, up: Tensor, gate: Tensor) -> Tensor:
        return functional.relu(up).square()

    def prepare_up(self, up: Tensor) -> Tensor:
        return up.relu_()

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return up.relu().square_()

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, gate_activation: Tensor | None
    ) -> tuple[Tensor, None]:
        return d_hidden.mul_(up.relu()).mul_(2), None


class GELU(Activation):
    """up · Phi(up), with the normal CDF Phi (arXiv 1606.08415), not its tanh approximation."""

    name = "gelu"

    def differentiable_forward(self, up: Tensor, gate: Tensor) -> Tensor:
        return functional.gelu(up)

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return functional.gelu(up)

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, gate_activation: Tensor | None
    ) -> tuple[Tensor, None]:
        return _aten.gelu_backward(d_hidden, up), None


class GatedActivation(Activation):
    """up · act(gate) (arXiv 2002.05202)."""

    is_gated = True

    @abstractmethod
    def activate(self, gate: Tensor) -> Tensor:
        """act(gate)."""

    @abstractmethod
    def activation_gradient(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        """Gradient of `gate` from the gradient of act(gate)."""

    def differentiable_forward(self, up: Tensor, gate: Tensor) -> Tensor:
        return self.activate(gate) * up

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return self.activate(gate).mul_(up)

    def recompute(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        gate_activation = self.activate(gate)
        return gate_activation * up, gate_activation

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, gate_activation: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert gate is not None
        assert gate_activation is not None
        d_up = gate_activation.mul_(d_hidden)
        return d_up, self.activation_gradient(d_hidden.mul_(up), gate)


class SwiGLU(GatedActivation):
    """up · gate · sigmoid(gate)."""

    name = "swiglu"

    def activate(self, gate: Tensor) -> Tensor:
        return functional.silu(gate)

    def activation_gradient(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.silu_backward(d_activated, gate)


class GeGLU(GatedActivation):
    """up · GELU(gate)."""

    name = "geglu"

    def activate(self, gate: Tensor) -> Tensor:
        return functional.gelu(gate)

    def activation_gradient(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.gelu_backward(d_activated, gate)


class TanhGeGLU(GatedActivation):
    """up · GELU(gate), with the tanh approximation of GELU: Gemma (arXiv 2403.08295)."""

    name = "geglu_tanh"

    def activate(self, gate: Tensor) -> Tensor:
        return functional.gelu(gate, approximate="tanh")

    def activation_gradient(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.gelu_backward(d_activated, gate, approximate="tanh")


class ClampedSwiGLU(Activation):
    """gate · sigmoid(alpha · gate) · (up + 1), with gate clamped to at most `limit` and up to ±`limit`: GPT-OSS's
    experts (arXiv 2508.10925)."""

    name, is_gated = "swiglu_clamped", True

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        self.settings = self._alpha, self._limit = alpha, limit

    def differentiable_forward(self, up: Tensor, gate: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return gate * (gate * self._alpha).sigmoid() * (up + 1)

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return self._swish(gate).mul_(self._shift(up))

    def recompute(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        gate_activation = self._swish(gate)
        return self._shift(up).mul_(gate_activation), gate_activation

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, gate_activation: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients are zero beyond the limit but not at it, as in torch's clamp."""
        assert gate is not None
        assert gate_activation is not None
        d_up = gate_activation.mul_(d_hidden).masked_fill_(up.abs() > self._limit, 0.0)
        d_activated = d_hidden.mul_(self._shift(up))
        # gate · sigmoid(alpha · gate) is silu(alpha · gate) / alpha.
        d_gate = _aten.silu_backward(d_activated, gate * self._alpha)
        return d_up, d_gate.masked_fill_(gate > self._limit, 0.0)

    def _swish(self, gate: Tensor) -> Tensor:
        gate = gate.clamp(max=self._limit)
        return (gate * self._alpha).sigmoid_().mul_(gate)

    def _shift(self, up: Tensor) -> Tensor:
        return up.clamp(-self._limit, self._limit).add_(1)


_KINDS: dict[str, type[Activation]] = {
    kind.name: kind for kind in (ReLU, SquaredReLU, GELU, SwiGLU, GeGLU, TanhGeGLU, ClampedSwiGLU)
}


def build_activation(name: str, settings: Sequence[float] = ()) -> Activation:
    """Build an activation by name, with its default settings if none are given."""
    return _KINDS[name](*settings)


ACTIVATIONS: dict[str, Activation] = {name: build_activation(name) for name in _KINDS}
"""Activations with default settings, by name."""
