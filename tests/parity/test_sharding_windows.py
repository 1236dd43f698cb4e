"""Windows of a split dimension and rows passed round a ring, on gloo ranks, held against the whole."""

import math
import random

import pytest
import torch

from moe.sharding.exchange.exchange import part_of
from moe.sharding.exchange.halo import Window, fetch
from moe.sharding.exchange.mesh import ShardingMesh
from moe.sharding.exchange.ring import ring_product
from moe.sharding.placement import WHOLE, split

NUM_CASES = 40


def windows_at_random(degrees: tuple[int, ...], seed: int) -> list[str]:
    """Cases in which what a rank fetches is not what lies there in the whole."""
    mesh, draw, wrong = ShardingMesh.over(degrees), random.Random(seed), []
    for case in range(NUM_CASES):
        axis, dim = draw.randrange(len(degrees)), draw.randrange(2)
        size = draw.choice([1, 2, 3, 5, 8])
        window = Window(
            draw.randrange(-4, 5), draw.randrange(-4, 5), draw.randrange(1, 7), size, divisor=draw.choice([1, 1, 2, 3])
        )
        dtype = draw.choice([torch.float64, torch.int64, torch.bool])
        shape = [3, 3]
        shape[dim] = size
        whole = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(case)).to(dtype)
        placements = tuple(split(dim) if each == axis else WHOLE for each in range(len(degrees)))
        part = part_of(whole, placements, mesh)
        value = draw.choice([0, 1])
        found = fetch(mesh, [part], axis, dim, [window], value)
        start = window.start(mesh.indices[axis])
        expected = [
            whole.select(dim, at) if 0 <= at < size else torch.full((3,), value, dtype=dtype)
            for at in range(start, start + window.length)
        ]
        if not torch.equal(found, torch.stack(expected, dim)):
            wrong.append(f"{window} of {shape} {dtype} along axis {axis}: {found}")
    return wrong


def rings(degrees: tuple[int, ...]) -> list[str]:
    """Products and permutations that are wrong."""
    mesh, wrong = ShardingMesh.over(degrees), []
    generator = torch.Generator().manual_seed(0)
    for axis, degree in enumerate(degrees):
        index = mesh.indices[axis]
        for shift in (-1, 0, 1, 2):
            arriving = mesh.permute(torch.full((2, 3), float(index)), axis, shift)
            if not torch.equal(arriving(), torch.full((2, 3), float((index + shift) % degree))):
                wrong.append(f"permute by {shift} along axis {axis}")
        first, second = (torch.randn(shape, generator=generator).double() for shape in ((2, 5, 4), (2, 4, 7)))
        product = first @ second
        parts = [
            part_of(whole, tuple(split(dim) if each == axis else WHOLE for each in range(len(degrees))), mesh)
            for whole, dim in ((first, 1), (second, 2), (product, 1), (product, 2))
        ]
        rows = ring_product(mesh, *parts[:2], axis, "second", 7)
        columns = ring_product(mesh, *parts[:2], axis, "first", 5)
        if not (torch.allclose(rows, parts[2]) and torch.allclose(columns, parts[3])):
            wrong.append(f"product along axis {axis}")
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [(2,), (4,), (2, 2), (1, 2)], ids=str)
def test_windows_are_the_wholes(ranks, degrees):
    size = math.prod(degrees)
    assert ranks[size].run(windows_at_random, degrees, 7) == [[]] * size


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [(2,), (4,), (2, 2), (1, 2)], ids=str)
def test_parts_go_round_a_ring(ranks, degrees):
    size = math.prod(degrees)
    assert ranks[size].run(rings, degrees) == [[]] * size
