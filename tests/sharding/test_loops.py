"""Products as loops over parts that pass around a ring of ranks: results and gradients of one device."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe.sharding.capture.capture import capture
from moe.sharding.exchange.mesh import OneDevice
from moe.sharding.exchange.ring import ring_product
from moe.sharding.propagation.assignment import Assignment
from moe.sharding.rules.registry import rule_of
from moe.sharding.rules.rule import AxisOption
from tests.sharding.modules import Function
from tests.sharding.partitioned import check_function, operators, program_of, run_program
from tests.sharding.thread_mesh import on_threads


def products(first: Tensor, second: Tensor, left: Tensor, bias: Tensor, square: Tensor) -> Tensor:
    """One product of each kind."""
    x = torch.addmm(bias, first, second, beta=0.5, alpha=2.0)
    y = torch.baddbmm(square, x.expand(left.shape[0], -1, -1), left)
    return (y @ (first @ second)).pow(2).mean()


def _ring(option: AxisOption) -> bool:
    return option.exchange is not None and option.exchange.kind == "ring"


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_products_of_any_size_pass_around_a_ring(seed):
    torch.manual_seed(seed)
    batch, rows, inner, columns = (random.Random(seed).choice([2, 3, 4, 5, 7]) for _ in range(4))
    shapes = (rows, inner), (inner, columns), (batch, columns, rows), (columns,), (batch, rows, rows)
    check_function(products, *shapes, cases=8, seed=seed, prefer=_ring)


@pytest.mark.parametrize("operand", ["first", "second"])
def test_a_ring_moves_the_bytes_that_its_rule_says(operand):
    module = Function(torch.matmul, torch.randn(6, 5), torch.randn(5, 8)).double().requires_grad_(False)
    captured_graph = capture(module, ())
    (product,) = operators(captured_graph)
    (option,) = [
        candidate for candidate in rule_of(product).axis_options() if candidate.name.endswith(f"ring, {operand} passed")
    ]
    assert option.exchange is not None
    program = program_of(captured_graph, Assignment((4,), {}, {product.name: (option,)}))

    def moved_bytes(mesh):
        run_program(program, module, (), mesh)
        return sum(num_bytes for kind, _, num_bytes in mesh.log if kind == "permute")

    assert on_threads((4,), moved_bytes) == [option.exchange.moved_bytes(4)] * 4


def test_a_part_is_sent_while_it_is_multiplied():
    events: list[str] = []

    class LoggingMesh(OneDevice):
        def permute(self, rows: Tensor, axis: int, shift: int) -> Callable[[], Tensor]:
            events.append("send")
            return lambda: events.append("wait") or rows

    class Products(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.matmul:
                events.append("multiply")
            return func(*args, **(kwargs or {}))

    with Products():
        product = ring_product(LoggingMesh((3,), (0,)), torch.ones(2, 4), torch.ones(4, 1), 0, "second", 3)
    assert torch.equal(product, torch.full((2, 3), 4.0))
    assert events == ["send", "multiply", "wait", "send", "multiply", "wait", "multiply"]
