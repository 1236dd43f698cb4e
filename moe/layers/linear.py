"""A matrix, and what it may add."""

from torch import Tensor, nn
from torch.nn import functional

from moe.parallel import narrowed


class Linear(nn.Module):
    """x · w, and a bias where its table has one."""

    weight: nn.Parameter
    """`[out, in]`"""
    bias: nn.Parameter | None
    """`[out]`"""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., out]` for `x` `[..., in]`, in the dtype of `x`."""
        return self.biased(self.product(x))

    def product(self, x: Tensor) -> Tensor:
        """The same without the bias: for parts that are to be added up first."""
        return functional.linear(x, narrowed(self.weight, x.dtype))

    def biased(self, y: Tensor) -> Tensor:
        """`y` `[..., out]` with the bias, where there is one."""
        return y if self.bias is None else y + self.bias.to(y.dtype)
