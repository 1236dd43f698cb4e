"""Slices, concatenations, padding, reversal, rotation and reshapes move the boundaries between parts: results and
gradients of one device, with uneven and empty parts."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.sharding.capture.capture import capture
from moe.sharding.exchange.halo import Window, moved_positions
from moe.sharding.rules.registry import rule_of
from moe.sharding.rules.rule import AxisOption
from tests.grid import seeds
from tests.sharding.modules import Function
from tests.sharding.partitioned import check_at_random

SIZES = (1, 2, 3, 4, 5, 7, 9)


def weighted_function(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Function:
    """A function of reciprocals of parameters, which are infinite where there is padding, with weights that give each
    element its own gradient."""

    def run(weights: Tensor, *parameters: Tensor) -> Tensor:
        return (function(*(parameter.reciprocal() for parameter in parameters)) * weights).pow(2).sum(-1)

    parameters = [torch.rand(shape) + 0.5 for shape in shapes]
    return Function(run, torch.randn(function(*parameters).shape), *parameters)


def exchanges(option: AxisOption) -> bool:
    return option.exchange is not None


def check(function: Callable[..., Tensor], *shapes: tuple[int, ...], seed: int, cases: int = 6) -> None:
    torch.manual_seed(seed)
    module = weighted_function(function, *shapes).double()
    check_at_random(module, (), cases=cases, seed=seed, prefer=exchanges if seed % 3 else None)


def _shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.choice(SIZES) for _ in range(draw.choice([1, 2, 3])))


@pytest.mark.parametrize("seed", seeds(1, 12))
def test_slices(seed):
    draw = random.Random(seed)
    shape = _shape(draw)
    dim = draw.randrange(len(shape))
    begin, end = draw.randrange(shape[dim]), draw.randrange(-1, shape[dim] + 3)
    step = draw.choice([1, 1, 2, 3])
    index = (*[slice(None)] * dim, slice(begin, max(begin + 1, end % (shape[dim] + 3)), step))
    check(lambda x: x[index] * 2, shape, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_single_positions(seed):
    draw = random.Random(seed)
    shape = (*_shape(draw), 5)
    dim = draw.randrange(len(shape))
    index = draw.randrange(-shape[dim], shape[dim])
    check(lambda x: x.select(dim, index).unsqueeze(-1) * 2, shape, seed=seed)
    check(lambda x: x.narrow(dim, index % shape[dim], 1) * 2, shape, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("index", range(5))
def test_single_positions_are_not_read_from_padding(index):
    """Parts that are split twice have padding where the next rank's positions start."""
    module = weighted_function(lambda x: x[index].unsqueeze(-1) * 2, (5,)).double()
    check_at_random(module, (), prefer=lambda option: option.name == "split d0", meshes=[(2, 2)], cases=4)


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_writes_of_slices(seed):
    draw = random.Random(seed)
    size, step = draw.choice(SIZES) + 2, draw.choice([1, 1, 2])
    begin = draw.randrange(size)
    count = len(range(begin, size, step))
    check(lambda x, y: torch.slice_scatter(x, y, 0, begin, size, step), (size, 3), (count, 3), seed=seed)
    check(lambda x, y: torch.select_scatter(x, y, 1, begin), (4, size), (4,), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_concatenations(seed):
    draw = random.Random(seed)
    sizes = [draw.choice(SIZES) for _ in range(draw.choice([2, 3, 4]))]
    dim = draw.randrange(2)
    shapes = [(3, size) if dim else (size, 3) for size in sizes]
    check(lambda *parts: torch.cat([*parts, parts[0]], dim), *shapes, seed=seed)
    check(lambda x: torch.cat(x.split([1, 2, 4], 0)[::-1]), (7, 2), seed=seed)
    check(lambda x, y: torch.stack([x, y], 1), (5, 2), (5, 2), seed=seed)


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_padding(seed):
    draw = random.Random(seed)
    shape = (draw.choice(SIZES) + 2, draw.choice(SIZES) + 2)
    pads = [draw.choice([-1, 0, 1, 2, 5]) for _ in range(4)]
    value = draw.choice([0.0, 3.0])
    check(lambda x: F.pad(x, pads, value=value), shape, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_reversal_and_rotation(seed):
    draw = random.Random(seed)
    shape = (draw.choice(SIZES), draw.choice(SIZES))
    dims = draw.choice([(0,), (1,), (0, 1)])
    check(lambda x: x.flip(dims), shape, seed=seed)
    shifts = (draw.randrange(-9, 9), draw.randrange(-9, 9))
    check(lambda x: x.roll(shifts, (0, 1)), shape, seed=seed)
    check(lambda x: x.roll(shifts[0]), shape, seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_overlapping_windows_and_diagonals(seed):
    draw = random.Random(seed)
    size, step = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    check(lambda x: x.detach().unfold(0, size, step) * x.sum(), (draw.choice(SIZES) + 3, 3), seed=seed)
    offset = draw.choice([-1, 0, 2])
    check(lambda x: x.diagonal(offset, 0, 2) * 2, (4, 3, 5), seed=seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["reflect", "circular"])
@pytest.mark.parametrize("seed", range(3))
def test_padding_by_values(mode, seed):
    draw = random.Random(seed)
    pads = [draw.choice([0, 1, 2, 3]) for _ in range(4)]
    check(lambda x: F.pad(x, pads, mode=mode), (2, 3, 4, 5), seed=seed)


@pytest.mark.slow
def test_assigned_slices():
    def assign_slices(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        x[1:4] = y
        x[:, 2] = x[:, 0] + 1
        x[5] = 3.0
        x[0, 3:].zero_()
        return x

    for seed in (1, 2, 3):
        check(assign_slices, (6, 5), (3, 5), seed=seed)


RESHAPES = (
    ((3, 2), (6,)), ((6,), (3, 2)), ((4, 6), (3, 8)), ((7, 2, 3), (7, 6)), ((5, 3), (15,)), ((2, 9), (3, 2, 3)),
    ((3, 1, 5, 4), (15, 1, 2, 2)), ((2, 5, 6), (2, 3, 10)), ((4, 3, 5), (12, 5)),
)  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize(("before", "after"), RESHAPES, ids=str)
def test_reshapes(before, after):
    for seed in (1, 2):
        check(lambda x: x.reshape(after), before, seed=seed)


def test_a_reshape_that_keeps_boundaries_moves_nothing():
    graph = capture(weighted_function(lambda x: x.reshape(12, 5), (4, 3, 5)), ()).graph.graph
    views = graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    node = next(node for node in views if node.meta["val"].shape == (12, 5))
    (exchange,) = rule_of(node).exchanges
    assert [exchange.moved_bytes(degree) for degree in (2, 3, 4)] == [0, 4 * 5 * 4, 0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_moved_positions_of_a_window_are_counted(data):
    size, degree = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    small = st.integers(-8, 8)
    window = Window(
        data.draw(small), data.draw(small), data.draw(st.integers(0, 9)), size, divisor=data.draw(st.integers(1, 3))
    )
    part = -(-size // degree)
    lacking = [
        {*range(window.start(rank), window.start(rank) + window.length)}
        & {*range(size)} - {*range(rank * part, (rank + 1) * part)}
        for rank in range(degree)
    ]
    assert moved_positions(window, part, degree) == max(map(len, lacking))
