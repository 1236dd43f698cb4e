"""Blocks that repeat are captured once, and compute what the plain module computes."""

import pytest
import torch
from torch import Tensor, nn

from moe.sharding.capture.capture import capture
from moe.sharding.capture.siblings import find_repeats
from moe.sharding.operands import is_operator
from tests.sharding.partitioned import check_at_random


class Norm(nn.Module):
    """Attention's place is taken by a mean; a batch norm has buffers that change."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, rows: Tensor, *, sign: float = 1.0) -> tuple[Tensor, Tensor, str]:
        print("a block runs")
        shared = x.index_select(0, rows).mean(0, keepdim=True)
        y = self.second(torch.tanh(self.first(x + shared))) * sign
        return self.norm(x + y * self.scale), y.abs().sum(-1), "said"


class Stack(nn.Module):
    def __init__(self, depth: int, tied: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(5, 6)
        self.layers = nn.ModuleList(Norm(6) for _ in range(depth))
        if tied:
            for layer in self.layers:
                layer.first.weight = self.layers[0].first.weight

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = self.before(x) if x.shape[-1] == 5 else x
        total = x.new_zeros(())
        for layer in self.layers:
            x, sums, _ = layer(x, rows, sign=-1.0)
            total = total + sums.mean()
        return x.square().mean() + 0.1 * total


SAMPLE = (torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, 3, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_programs_of_repeated_blocks_are_those_of_one_device(tied: bool):
    torch.manual_seed(0)
    check_at_random(Stack(3, tied).double(), SAMPLE, cases=15)


@pytest.mark.slow
def test_a_block_that_nothing_is_trained_before_is_another_one():
    torch.manual_seed(0)
    check_at_random(Stack(3).double(), (torch.randn(7, 6, dtype=torch.float64), SAMPLE[1]), cases=8)


def test_a_block_runs_as_often_for_many_layers_as_for_two(capsys: pytest.CaptureFixture[str]):
    counts = []
    for depth in (2, 9):
        captured = capture(Stack(depth).double(), SAMPLE)
        runs = capsys.readouterr().out.count("a block runs")
        counts.append((runs, sum(map(is_operator, captured.graph.graph.nodes))))
    assert counts[0][0] == counts[1][0] > 0
    assert counts[1][1] > 3 * counts[0][1]


def test_the_graph_is_that_of_layers_captured_one_by_one(monkeypatch: pytest.MonkeyPatch):
    together = capture(Stack(4).double(), SAMPLE)
    # Nothing is faked: the reference is the product's own way with layers that differ, each captured by itself.
    monkeypatch.setattr("moe.sharding.capture.capture.find_repeats", lambda module: [])
    apart = capture(Stack(4).double(), SAMPLE)
    kinds = [sorted(str(n.target) for n in each.graph.graph.nodes if is_operator(n)) for each in (together, apart)]
    assert kinds[0] == kinds[1]
    assert together.gradients.keys() == apart.gradients.keys()
    assert together.updates.keys() == apart.updates.keys()


class Different(nn.Module):
    """Layers that only look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[1].weight.requires_grad_(False)
        self.factors = nn.ModuleList(Factor(number) for number in (1.0, 2.0, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            x = factor(torch.tanh(layer(x)))
        return x.sum()


class Factor(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number, self.shift = number, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number + self.shift


def test_layers_that_only_look_alike_are_told_apart():
    assert [len(alike) for alike in find_repeats(Different())] == [2, 2]
    check_at_random(Different().double(), (torch.randn(4, 6, dtype=torch.float64),), cases=6)
