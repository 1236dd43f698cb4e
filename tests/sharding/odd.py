"""A small module with parameters of every kind, and random placements for it."""

import random
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moe import sharding

Hints = dict[str, sharding.Split | sharding.Replicate | sharding.Shard]


class Odd(nn.Module):
    """Parameters of uneven sizes: a scalar, a vector of one, a frozen, an unused and a tied one; and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor([0.1]))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("offsets", torch.linspace(0, 1, 7), persistent=False)
        self.offsets: Tensor

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(self.table(ids) + x)) * self.frozen + self.second(x))
        return (self.last(h + self.offsets) * self.scale + self.shift).square().mean()


def odd(seed: int = 0) -> tuple[Odd, tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    module = Odd().double()
    return module, (torch.randint(0, 9, (6,)), torch.randn(6, 5, dtype=torch.float64))


def random_hints(module: nn.Module, mesh: Mapping[str, int], draw: random.Random) -> Hints:
    """Hints for every used parameter: along each axis replicated, or split in some dimension. The vector of one is
    always split, so that some parts are empty."""
    hints: Hints = {}
    for name, parameter in module.named_parameters():
        dims = list(range(parameter.dim()))
        cuts = {axis: draw.choice(dims) for axis in mesh if dims and draw.random() < 0.8}
        if name == "shift":
            cuts |= {next(iter(mesh)): 0}
        if name != "unused":
            hints[name] = sharding.Shard(cuts) if cuts else sharding.Replicate()
    return hints
