"""The feed-forward layer without experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from moe.experts import Activation, build_activation
from moe.layers.linear import Linear, product
from moe.parallel import Layout, TokenShares, narrowed


class FeedForward(nn.Module):
    """Two matrices and an activation, or three where that has a gate (arXiv 2002.05202). Where it is split over tensor
    ranks, each has some of the hidden units, and all of the tokens while it works on them."""

    recompute = False
    """Hidden states are made again in the backward pass."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        self.activation = build_activation(activation)
        self.w_in, self.w_out = Linear(), Linear()
        self.w_gate = Linear() if self.activation.gated else None

    def wire(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"

    def forward(self, x: Tensor, shares: TokenShares) -> Tensor:
        """`[t, M]` for `x` `[t, M]`, this rank's share of the tokens."""
        x = shares.gather(x)
        if self.recompute and torch.is_grad_enabled():
            return shares.scatter(checkpoint(self._of, x, use_reentrant=False, preserve_rng_state=False))
        return shares.scatter(self._of(x))

    def _of(self, x: Tensor) -> Tensor:
        if (
            self.activation.name == "relu"
        ):  # hidden states are all that its gradient needs: kept once, by autograd
            return self.w_out(self.w_in(x).relu_())
        gate = None if self.w_gate is None else self.w_gate(x)
        if self.w_out.weight_lora_a is not None:
            up = self.w_in(x)
            return self.w_out(self.activation.plain(up, up if gate is None else gate))
        return _ActivatedLinear.apply(
            self.w_in(x), gate, narrowed(self.w_out.weight, x.dtype), self.activation
        )


class _ActivatedLinear(torch.autograd.Function):
    """act(up, gate) · w, of `up` and `gate` `[t, hidden]` and `w` `[M, hidden]`. These alone are kept: hidden states
    are made again in the backward pass, where autograd would keep them beside, and the activated gate."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, gate: Tensor | None, w: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(up, gate, w)
        ctx.activation = activation
        return product(activation.forward(up, gate), w.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        up, gate, w = ctx.saved_tensors
        hidden, activated = ctx.activation.recompute(up, gate)
        d_w = product(d_y.t(), hidden) if ctx.needs_input_grad[2] else None
        del hidden
        d_up, d_gate = ctx.activation.backward(product(d_y, w), up, gate, activated)
        return d_up, d_gate, d_w, None
