"""Activations between an expert's matrices, forward and backward."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


class Activation(ABC):
    """Hidden states from what the first matrices gave: `up` `[n, H]`, and `gate` `[n, H]` where the activation has
    one, else None."""

    gated: bool

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

    gated = False

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

    gated = False

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

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return self.activate(gate).mul_(up)

    def recompute(self, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        activated = self.activate(gate)
        return activated * up, activated

    def backward(
        self, d_hidden: Tensor, up: Tensor, gate: Tensor | None, activated: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert gate is not None
        assert activated is not None
        d_up = activated.mul_(d_hidden)
        return d_up, self.through(d_hidden.mul_(up), gate)


class SwiGLU(Gated):
    """up · gate · sigmoid(gate)."""

    def activate(self, gate: Tensor) -> Tensor:
        return functional.silu(gate)

    def through(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.silu_backward(d_activated, gate)


class GeGLU(Gated):
    """up · GELU(gate)."""

    def activate(self, gate: Tensor) -> Tensor:
        return functional.gelu(gate)

    def through(self, d_activated: Tensor, gate: Tensor) -> Tensor:
        return _aten.gelu_backward(d_activated, gate)


ACTIVATIONS: dict[str, Activation] = {"relu": ReLU(), "gelu": GELU(), "swiglu": SwiGLU(), "geglu": GeGLU()}
