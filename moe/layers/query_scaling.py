"""Factors of queries that grow with their positions (arXiv 2501.19399)."""

import torch
from torch import Tensor

from moe.spec.language import QueryScaling


def query_scales(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """Factors `[B, 1, N, 1]` of queries at `positions` int64 `[B, N]`, in float64."""
    numbers = positions + scaling.first_position
    periods = numbers.div(scaling.tokens, rounding_mode="floor").to(torch.float64)
    return (1 + scaling.coefficient * periods.log1p())[:, None, :, None]
