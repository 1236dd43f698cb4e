"""The feed-forward layer without experts."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.layers.linear import Linear
from moe.parallel import Layout


class FeedForward(nn.Module):
    """Two matrices and a ReLU. Where it is split over tensor ranks, each has some of the hidden units."""

    recompute = False
    """Hidden states are made again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = Linear(), Linear()

    def wire(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"

    def forward(self, x: Tensor) -> Tensor:
        """`[..., M]` for `x` `[..., M]`: what the tensor ranks give adds up."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._of, x, use_reentrant=False, preserve_rng_state=False)
        return self._of(x)

    def _of(self, x: Tensor) -> Tensor:
        return self.w_out(self.w_in(x).relu_())
