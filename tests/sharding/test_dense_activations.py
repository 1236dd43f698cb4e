"""Feed-forward layers without experts, of every activation, under assignments drawn at random."""

import pytest
import torch
from torch import Tensor, nn

from moe.layers.feed_forward import FeedForward
from moe.parallel import SequenceShard, declare
from moe.spec.parameter import linear
from tests.sharding.partitioned import check_at_random


class Loss(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.dense = FeedForward(activation)
        names = ("w_in", "w_gate") if self.dense.activation.gated else ("w_in",)
        into = (linear(name, ("hidden", 12), ("model", 6)) for name in names)
        declare(self.dense, (*into, linear("w_out", ("model", 6), ("hidden", 12))), torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x, SequenceShard(len(x))).square().sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu", "geglu"])
def test_any_split(activation: str) -> None:
    torch.manual_seed(0)
    check_at_random(Loss(activation), (torch.randn(8, 6).double(),), cases=6)
