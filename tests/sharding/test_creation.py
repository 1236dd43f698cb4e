"""Tensors made of nothing, under random assignments."""

import torch
from torch import Tensor, nn

from moe.sharding.capture.capture import capture
from moe.sharding.operands import is_operator, operands
from moe.sharding.rules.registry import rule_of
from tests.sharding.partitioned import check_at_random, drawn, programmed

D = torch.float64


class Made(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 7, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(5, 7) + torch.ones_like(self.a) + torch.full((7,), 3) + torch.arange(7)
        made = made + torch.arange(2, 9, dtype=D) + torch.arange(0.5, 4, 0.5, dtype=D) + torch.arange(14, 0, -2)
        made = made + torch.eye(5, 7) + x.new_zeros(5, 1) + torch.linspace(-1, 2, 7, dtype=D)
        made = made + torch.empty_like(self.a).fill_(2) + torch.full_like(self.a, 4) + torch.tensor(2.5)
        return self.a * made * torch.eye(5, dtype=D)[:, :1] * torch.tril(torch.ones(5, 7))


class Positions(nn.Module):
    """What the parts are multiplied with depends on where they lie in the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(7, 6, dtype=D))

    def forward(self, i: Tensor) -> Tensor:
        where = torch.arange(7)[:, None] <= torch.arange(6)
        return self.a.gather(0, i) * torch.where(where, 1.0, -1.0) * torch.linspace(0, 1, 6, dtype=D)


def test_each_rank_makes_its_part() -> None:
    check_at_random(Made(), (torch.randn(3, dtype=D),), cases=15)
    check_at_random(Positions(), (torch.randint(0, 7, (7, 6)),), cases=15)


def test_parts_are_split_where_there_is_a_way() -> None:
    check_at_random(Made(), (torch.randn(3, dtype=D),), cases=10, seed=1, prefer=lambda o: o.factor is not None)


def test_what_is_made_for_gradients_alone_is_not_kept_for_them() -> None:
    captured = capture(Positions(), (torch.zeros(7, 6, dtype=torch.int64),))
    made = [each for each in captured.graph.graph.nodes if is_operator(each) and not operands(each)]
    zeros = [each for each in made if tuple(each.meta["val"].shape) == (7, 6) and each in captured.backward]
    assert len(zeros) == 1
    import random

    program = programmed(captured, drawn(captured, (2,), random.Random(0)))
    forward = str(program.forward.graph)
    assert "aten.full.default" not in forward


def test_dimensions_of_what_is_made_are_factors() -> None:
    captured = capture(Positions(), (torch.zeros(7, 6, dtype=torch.int64),))
    for node in captured.graph.graph.nodes:
        if is_operator(node) and not operands(node) and node.meta["val"].dim():
            assert {each.factor for each in rule_of(node).axis_options()} >= {"d0"}
