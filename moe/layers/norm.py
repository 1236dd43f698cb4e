"""Layer norm with a scale and no bias."""

from torch import Tensor, nn
from torch.nn import functional


class LayerNorm(nn.Module):
    """Zero mean and unit variance over the last dimension, then a learned scale (arXiv 1607.06450)."""

    weight: nn.Parameter
    """`[M]`"""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """In the shape and dtype of `x` `[..., M]`."""
        return functional.layer_norm(x, self.weight.shape, self.weight.to(x.dtype))
