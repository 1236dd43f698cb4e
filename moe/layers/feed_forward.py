"""The feed-forward layer without experts."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.layers.linear import Linear
from moe.parallel import Layout, TokenShares


class FeedForward(nn.Module):
    """Two matrices and a ReLU. Where it is split over tensor ranks, each has some of the hidden units, and all of
    the tokens while it works on them."""

    recompute = False
    """Hidden states are made again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = Linear(), Linear()

    def wire(self, layout: Layout) -> None:
        self.recompute = layout.recompute == "selective"

    def forward(self, x: Tensor, shares: TokenShares) -> Tensor:
        """`[t, M]` for `x` `[t, M]`, this rank's share of the tokens."""
        x = shares.gather(x)
        if self.recompute and torch.is_grad_enabled():
            return shares.scatter(checkpoint(self._of, x, use_reentrant=False, preserve_rng_state=False))
        return shares.scatter(self._of(x))

    def _of(self, x: Tensor) -> Tensor:
        return self.w_out(self.w_in(x).relu_())
