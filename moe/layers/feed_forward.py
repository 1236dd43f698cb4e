"""The feed-forward layer without experts."""

import torch
from torch import Tensor, nn

from moe.layers.linear import Linear


class FeedForward(nn.Module):
    """Two matrices and a ReLU."""

    def __init__(
        self, model_dim: int, ffn_dim: int, *, name: str, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.w_in = Linear(model_dim, ffn_dim, name=f"{name}.w_in", seed=seed, dtype=dtype, device=device)
        self.w_out = Linear(ffn_dim, model_dim, name=f"{name}.w_out", seed=seed, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., M]` for `x` `[..., M]`."""
        return self.w_out(self.w_in(x).relu_())
