"""The feed-forward layer without experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.layers.linear import Linear
from moe.parallel import Layout


class FeedForward(nn.Module):
    """Two matrices and a ReLU. Where it is split over tensor ranks, each has some of the hidden units."""

    def __init__(
        self, model_dim: int, ffn_dim: int, layout: Layout, *, name: str, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        settings: dict[str, Any] = {"seed": seed, "dtype": dtype}
        self.w_in = Linear(model_dim, ffn_dim, layout, name=f"{name}.w_in", cuts={"tensor": 0}, **settings)
        self.w_out = Linear(ffn_dim, model_dim, layout, name=f"{name}.w_out", cuts={"tensor": 1}, **settings)
        self.recompute = layout.recompute == "selective"
        """Whether hidden states are made again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., M]` for `x` `[..., M]`: what the tensor ranks give adds up."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._of, x, use_reentrant=False, preserve_rng_state=False)
        return self._of(x)

    def _of(self, x: Tensor) -> Tensor:
        return self.w_out(self.w_in(x).relu_())
