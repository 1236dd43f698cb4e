"""Programs under random assignments compute what one device computes: outputs and every gradient."""

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.partitioned import check_at_random


class UnevenMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return ((self.second(hidden.view(-1, 10)).view(*x.shape[:-1], 7) - y) ** 2).mean()


class EinsumExperts(nn.Module):
    """Every token to all experts, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(6, 4))
        self.w_in, self.w_out = nn.Parameter(torch.randn(4, 6, 5)), nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.tanh(torch.einsum("GSM,ME->GSE", x, self.router))
        dispatched = torch.einsum("GSE,GSM->EGSM", gates, x)
        hidden = torch.relu(torch.einsum("EGSM,EMH->EGSH", dispatched, self.w_in))
        return torch.einsum("EGSH,EHM->GSM", hidden, self.w_out).pow(2).sum()


@pytest.mark.parametrize("seed", range(2))
def test_an_mlp_of_uneven_sizes(seed):
    torch.manual_seed(seed)
    sample = (torch.randn(4, 3, 6).double(), torch.randn(4, 3, 7).double())
    check_at_random(UnevenMLP().double(), sample, cases=15, seed=seed)


@pytest.mark.parametrize("seed", range(2))
def test_experts_in_einsum(seed):
    torch.manual_seed(seed)
    check_at_random(EinsumExperts().double(), (torch.randn(3, 5, 6).double(),), cases=15, seed=seed)
