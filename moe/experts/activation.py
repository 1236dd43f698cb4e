"""What stands between an expert's matrices, forward and backward."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


class Activation(ABC):
    """Hidden states from what the first matrices gave: `up` `[n, H]`, and `gate` `[n, H]` where the activation has
    one, else None."""

    gated: bool

    @abstractmethod
    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """`[n, H]`. It may write into `up`, where `again` knows of it."""

    def again(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """What `forward` gave, from what it left in `up` and `gate`: not kept for the backward pass, but made again."""
        return self.forward(up, gate)

    @abstractmethod
    def backward(self, d_hidden: Tensor, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(gradient of up, gradient of gate), as `forward` has left them; it may write into `d_hidden`."""


class ReLU(Activation):
    """max(up, 0): GShard's experts (arXiv 2006.16668, section 2.1)."""

    gated = False

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return up.relu_()

    def again(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return up

    def backward(self, d_hidden: Tensor, up: Tensor, gate: Tensor | None) -> tuple[Tensor, None]:
        return _aten.threshold_backward(d_hidden, up, 0), None


class GELU(Activation):
    """up · Phi(up), Phi the normal distribution's (arXiv 1606.08415), not its approximation by tanh."""

    gated = False

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        return functional.gelu(up)

    def backward(self, d_hidden: Tensor, up: Tensor, gate: Tensor | None) -> tuple[Tensor, None]:
        return _aten.gelu_backward(d_hidden, up), None


class SwiGLU(Activation):
    """up · gate · sigmoid(gate) (arXiv 2002.05202)."""

    gated = True

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return functional.silu(gate).mul_(up)

    def backward(self, d_hidden: Tensor, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        d_up = functional.silu(gate).mul_(d_hidden)
        return d_up, _aten.silu_backward(d_hidden.mul_(up), gate)


class GeGLU(Activation):
    """up · GELU(gate) (arXiv 2002.05202)."""

    gated = True

    def forward(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        return functional.gelu(gate).mul_(up)

    def backward(self, d_hidden: Tensor, up: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        assert gate is not None
        d_up = functional.gelu(gate).mul_(d_hidden)
        return d_up, _aten.gelu_backward(d_hidden.mul_(up), gate)


ACTIVATIONS: dict[str, Activation] = {"relu": ReLU(), "gelu": GELU(), "swiglu": SwiGLU(), "geglu": GeGLU()}
