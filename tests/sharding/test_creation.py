"""Created tensors under random assignments."""

import random

import pytest
import torch
from torch import Tensor

from moe.sharding.capture.capture import capture
from moe.sharding.operands import operands
from moe.sharding.rules.registry import rule_of
from tests.sharding.modules import Function
from tests.sharding.partitioned import check_at_random, check_function, operators, program_of, random_assignment

D = torch.float64


def create_tensors(a: Tensor, x: Tensor) -> Tensor:
    y = torch.zeros(5, 7) + torch.ones_like(a) + torch.full((7,), 3) + torch.arange(7)
    y = y + torch.arange(2, 9, dtype=D) + torch.arange(0.5, 4, 0.5, dtype=D) + torch.arange(14, 0, -2)
    y = y + torch.eye(5, 7) + x.new_zeros(5, 1) + torch.linspace(-1, 2, 7, dtype=D)
    y = y + torch.empty_like(a).fill_(2) + torch.full_like(a, 4) + torch.tensor(2.5)
    return a * y * torch.eye(5, dtype=D)[:, :1] * torch.tril(torch.ones(5, 7))


def by_position(a: Tensor, i: Tensor) -> Tensor:
    """Factors depend on the positions of a part in the whole."""
    is_below = torch.arange(7)[:, None] <= torch.arange(6)
    return a.gather(0, i) * torch.where(is_below, 1.0, -1.0) * torch.linspace(0, 1, 6, dtype=D)


POSITIONS, INDEX = Function(by_position, torch.randn(7, 6, dtype=D)), torch.randint(0, 7, (7, 6))


@pytest.mark.slow
def test_each_rank_creates_its_part() -> None:
    inputs = [torch.randn(3, dtype=D)]
    check_function(create_tensors, (5, 7), inputs=inputs, cases=15)
    check_function(
        create_tensors, (5, 7), inputs=inputs, cases=10, seed=1, prefer=lambda option: option.factor is not None
    )
    check_at_random(POSITIONS, (INDEX,), cases=15)


def test_tensors_created_for_gradients_alone_are_not_stored() -> None:
    captured_graph = capture(POSITIONS, (INDEX,))
    backward = [node for node in operators(captured_graph) if not operands(node) and node in captured_graph.backward]
    assert [tuple(node.meta["val"].shape) for node in backward].count((7, 6)) == 1
    program = program_of(captured_graph, random_assignment(captured_graph, (2,), random.Random(0)))
    assert "aten.full.default" not in str(program.forward.graph)


def test_dimensions_of_created_tensors_are_factors() -> None:
    for node in operators(capture(POSITIONS, (INDEX,))):
        if not operands(node) and node.meta["val"].dim():
            assert "d0" in {option.factor for option in rule_of(node).axis_options()}
