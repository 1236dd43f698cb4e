"""Layer norm with a scale and no bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class LayerNorm(nn.Module):
    """Zero mean and unit variance over the last dimension, then a learned scale (arXiv 1607.06450)."""

    def __init__(self, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """In the shape and dtype of `x` `[..., M]`."""
        return functional.layer_norm(x, self.weight.shape, self.weight.to(x.dtype))
