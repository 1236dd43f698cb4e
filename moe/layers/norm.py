"""Layer norm with a scale and no bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.parallel import Layout, new_parameter


class LayerNorm(nn.Module):
    """Zero mean and unit variance over the last dimension, then a learned scale (arXiv 1607.06450)."""

    def __init__(self, dim: int, layout: Layout, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter((dim,), None, layout, name="", seed=0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """In the shape and dtype of `x` `[..., M]`."""
        return functional.layer_norm(x, self.weight.shape, self.weight.to(x.dtype))
