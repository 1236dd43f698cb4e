"""A matrix whose initial values are keyed by its name."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.random import init_uniform_


class Linear(nn.Module):
    """x · w without bias; w `[out, in]` starts Uniform(±√3·in^-½)."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        name: str,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim, dtype=dtype, device=device))
        init_uniform_(self.weight, in_dim**-0.5, seed, f"{name}.weight")

    def forward(self, x: Tensor) -> Tensor:
        """`[..., out]` for `x` `[..., in]`, in the dtype of `x`."""
        return functional.linear(x, self.weight.to(x.dtype))
