"""Plans to look at: of a small stack of equal layers with annotations, and of a residual network."""

from functools import cache

import torch
from torch import Tensor, nn

from moe import sharding
from tests.sharding.modules import ConvolutionalNetwork
from tests.sharding.on_ranks import cores


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wi, self.wo = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = torch.relu(self.wi(self.norm(x)))
        return x + self.wo(sharding.split(hidden_states, 1, axis="model"))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.output = nn.Linear(width, 1000)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.output(x), targets)


@cache
def stack(depth: int = 5) -> sharding.ShardingPlan:
    with torch.device("meta"):
        model = Stack(depth)
    words = torch.empty(512, dtype=torch.int64)
    hints = {"inputs": sharding.Split(0, axis="data"), "layers.*.wi.weight": sharding.Shard({"model": 0})}
    return sharding.plan(model, (words, words), cores(4), hints, mesh={"data": 2, "model": 2})


@cache
def network() -> sharding.ShardingPlan:
    with torch.device("meta"):
        model = ConvolutionalNetwork(8, 16)
    batch = torch.empty(16, 3, 32, 32), torch.empty(16, dtype=torch.int64)
    return sharding.plan(model, batch, cores(4))


@cache
def single_device() -> sharding.ShardingPlan:
    """A plan for one device, where nothing is exchanged."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return sharding.plan(model, (torch.empty(3, 4),), cores(1), loss=lambda y: y.sum())


PLANS = {"stack": stack, "alone": single_device, "network": network}
