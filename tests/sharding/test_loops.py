"""Products as loops over parts that go round a ring of ranks: results and gradients of one device."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe.sharding.capture.capture import capture
from moe.sharding.exchange.mesh import OneDevice
from moe.sharding.exchange.ring import ring_product
from moe.sharding.operands import is_operator
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.registry import rule_of
from moe.sharding.rules.rule import AxisOption
from tests.sharding.partitioned import check_at_random, programmed, run_program
from tests.sharding.thread_mesh import on_threads


class Products(nn.Module):
    """One product of each kind."""

    def __init__(self, sizes: tuple[int, int, int, int]) -> None:
        super().__init__()
        batch, rows, inner, columns = sizes
        self.first, self.second = (nn.Parameter(torch.randn(shape)) for shape in ((rows, inner), (inner, columns)))
        self.left = nn.Parameter(torch.randn(batch, columns, rows))
        self.bias, self.square = (nn.Parameter(torch.randn(columns)), nn.Parameter(torch.randn(batch, rows, rows)))

    def forward(self) -> Tensor:
        x = torch.addmm(self.bias, self.first, self.second, beta=0.5, alpha=2.0)
        y = torch.baddbmm(self.square, x.expand(self.left.shape[0], -1, -1), self.left)
        return (y @ (self.first @ self.second)).pow(2).mean()


def _ring(option: AxisOption) -> bool:
    return option.exchange is not None and option.exchange.kind == "ring"


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_products_of_any_size_go_round(seed):
    torch.manual_seed(seed)
    sizes = tuple(random.Random(seed).choice([2, 3, 4, 5, 7]) for _ in range(4))
    check_at_random(Products(sizes).double(), (), cases=8, seed=seed, prefer=_ring)


class OneProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5, 8))

    def forward(self) -> Tensor:
        return self.first @ self.second


@pytest.mark.parametrize("passed", ["first", "second"])
def test_a_ring_moves_the_bytes_that_its_rule_says(passed):
    module = OneProduct().double().requires_grad_(False)
    captured = capture(module, ())
    (product,) = [node for node in captured.graph.graph.nodes if is_operator(node)]
    (option,) = [each for each in rule_of(product).axis_options() if each.name.endswith(f"ring, {passed} passed")]
    assert option.exchange is not None
    program = programmed(captured, Assignment((4,), {}, {product.name: (option,)}))

    def moved(mesh):
        run_program(program, module, (), mesh)
        return sum(given for kind, _, given in mesh.log if kind == "permute")

    assert on_threads((4,), moved) == [option.exchange.moved_bytes(4)] * 4


def test_a_part_is_on_its_way_while_it_is_multiplied():
    did: list[str] = []

    class Logged(OneDevice):
        def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
            did.append("send")
            return lambda: did.append("wait") or rows

    class Products(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.matmul:
                did.append("multiply")
            return func(*args, **(kwargs or {}))

    with Products():
        product = ring_product(Logged((3,), (0,)), torch.ones(2, 4), torch.ones(4, 1), 0, "second", 3)
    assert torch.equal(product, torch.full((2, 3), 4.0))
    assert did == ["send", "multiply", "wait", "send", "multiply", "wait", "multiply"]
