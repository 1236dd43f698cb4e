"""A matrix."""

from torch import Tensor, nn
from torch.nn import functional

from moe.parallel import narrowed


class Linear(nn.Module):
    """x · w without bias."""

    weight: nn.Parameter
    """`[out, in]`"""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., out]` for `x` `[..., in]`, in the dtype of `x`."""
        return functional.linear(x, narrowed(self.weight, x.dtype))
