"""Activations between an expert's matrices, forward and backward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


class Activation(ABC):
    """Hidden states from what the first matrices gave: `up` `[n, H]`, and `gate` `[n, H]` where the activation has
    one, else None."""

    name: ClassVar[str]
    gated: ClassVar[bool] = False
    settings: tuple[float, ...] = ()
    """Numbers that it was made with."""

    @abstractmethod
    def plain(self, up: Tensor, gate: Tensor) -> Tensor:
        """Hidden states by plain operations, which autograd knows; without a gate, `gate` is not looked at."""

    def leave(self, up: Tensor) -> Tensor:
        """The value that the methods below take for `up`, written over it where they need nothing else of it."""
        return up

    @abstractmethod
    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """`[n, H]`."""

    def recompute(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(what `forward` gave, the activated gate): not kept for the backward pass, but made again."""
        return self.forward(up, gate), None

    @abstractmethod
    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, activated: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(gradient of up, gradient of gate); it may write into `d_hidden` and what `recompute` has given."""


class ReLU(Activation):
    """max(up, 0): GShard's experts (arXiv 2006.16668, section 2.1)."""

    name = "relu"

    def plain(self, up: Tensor, gate: Tensor) -> Tensor:
        return functional.relu(up)

    def leave(self, up: Tensor) -> Tensor:
        return up.relu_()

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return up

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, activated: Tensor | None
    ) -> tuple[Tensor, None]:
        return _aten.threshold_backward(d_hidden, up, 0), None


class GELU(Activation):
    """up · Phi(up), Phi the normal distribution's (arXiv 1606.08415), not its approximation by tanh."""

    name = "gelu"

    def plain(self, up: Tensor, gate: Tensor) -> Tensor:
        return functional.gelu(up)

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return functional.gelu(up)

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, activated: Tensor | None
    ) -> tuple[Tensor, None]:
        return _aten.gelu_backward(d_hidden, up), None


class Gated(Activation):
    """up · act(gate) (arXiv 2002.05202)."""

    gated = True

    @abstractmethod
    def activate(self, gate: Tensor) -> Tensor:
        """act(gate)."""

    @abstractmethod
    def through(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        """The gradient of `gate` from that of act(gate)."""

    def plain(self, up: Tensor, gate: Tensor) -> Tensor:
        return self.activate(gate) * up

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return self.activate(gate).mul_(up)

    def recompute(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        gate_activation = self.activate(gate)
        return gate_activation * up, gate_activation

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, activated: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert gate is not None
        assert activated is not None
        d_up = activated.mul_(d_hidden)
        return d_up, self.through(d_hidden.mul_(up), gate)


class SwiGLU(Gated):
    """up · gate · sigmoid(gate)."""

    name = "swiglu"

    def activate(self, gate: Tensor) -> Tensor:
        return functional.silu(gate)

    def through(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.silu_backward(d_activated, gate)


class GeGLU(Gated):
    """up · GELU(gate)."""

    name = "geglu"

    def activate(self, gate: Tensor) -> Tensor:
        return functional.gelu(gate)

    def through(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.gelu_backward(d_activated, gate)


class ClampedSwiGLU(Activation):
    """gate · sigmoid(alpha · gate) · (up + 1), of a gate of at most the limit and an up within it on both sides:
    GPT-OSS's experts (arXiv 2508.10925)."""

    name, gated = "swiglu_clamped", True

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        self.settings = self._alpha, self._limit = alpha, limit

    def plain(self, up: Tensor, gate: Tensor) -> Tensor:
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
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, activated: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Neither has one where it is beyond the limit; at the limit it has, as torch's clamp gives it."""
        assert gate is not None
        assert activated is not None
        d_up = activated.mul_(d_hidden).masked_fill_(up.abs() > self._limit, 0.0)
        d_activated = d_hidden.mul_(self._shift(up))
        # gate · sigmoid(alpha · gate) is silu(alpha · gate) / alpha.
        d_gate = _aten.silu_backward(d_activated, gate * self._alpha)
        return d_up, d_gate.masked_fill_(gate > self._limit, 0.0)

    def _swish(self, gate: Tensor) -> Tensor:
        gate = gate.clamp(max=self._limit)
        return (gate * self._alpha).sigmoid_().mul_(gate)

    def _shift(self, up: Tensor) -> Tensor:
        return up.clamp(-self._limit, self._limit).add_(1)


_KINDS: dict[str, type[Activation]] = {kind.name: kind for kind in (ReLU, GELU, SwiGLU, GeGLU, ClampedSwiGLU)}


def build_activation(name: str, settings: Sequence[float] = ()) -> Activation:
    """The activation of this name, made with these numbers; with its own where there are none."""
    return _KINDS[name](*settings)


ACTIVATIONS: dict[str, Activation] = {name: build_activation(name) for name in _KINDS}
"""By name, with their own settings."""
