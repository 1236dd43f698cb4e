"""Sinusoidal position embeddings (arXiv 1706.03762, section 3.5): no weights, and no maximum length."""

import math

import torch
from torch import Tensor


def sinusoids(num_positions: int, dim: int, *, start: int = 0, device: torch.device) -> Tensor:
    """float64 `[num_positions, dim]` for positions from `start`: sines in the first half, cosines in the second."""
    positions = torch.arange(start, start + num_positions, dtype=torch.float64, device=device)
    half = dim // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64, device=device) * (-math.log(1e4) / max(1, half - 1)))
    angles = positions[:, None] * rates
    table = torch.cat((angles.sin(), angles.cos()), dim=1)
    return torch.nn.functional.pad(table, (0, dim % 2))
