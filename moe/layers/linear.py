"""A matrix whose initial values are keyed by its name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.parallel import Layout, narrowed, new_parameter


class Linear(nn.Module):
    """x · w without bias; w `[out, in]` starts Uniform(±√3·in^-½). A rank has the part of it that `cuts` leaves."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        layout: Layout,
        *,
        name: str,
        seed: int,
        dtype: torch.dtype,
        cuts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.weight = new_parameter(
            (out_dim, in_dim), in_dim**-0.5, layout, name=f"{name}.weight", seed=seed, dtype=dtype, cuts=cuts
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., out]` for `x` `[..., in]`, in the dtype of `x`."""
        return functional.linear(x, narrowed(self.weight, x.dtype))
