"""Moves between any two placements, windows and rings on gloo ranks, compared with slices of full tensors."""

import math
import random
from collections.abc import Iterable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.plan import Cluster
from moe.sharding.exchange.exchange import call_of, part_of, strip_padding
from moe.sharding.exchange.halo import Window, fetch
from moe.sharding.exchange.mesh import ShardingMesh
from moe.sharding.exchange.moves import Moves, PlacementMove
from moe.sharding.exchange.ring import ring_product
from moe.sharding.placement import WHOLE, AxisPlacement, Placements, part_shape, partial, split

NUM_CASES = 150


def apply_moves(
    part: Tensor, shape: Sequence[int], placements: Placements, moves: Iterable[PlacementMove], mesh: ShardingMesh
) -> Tensor:
    """This rank's padded part of a tensor of this shape after moves, as a program makes them."""
    for move in moves:
        assert placements[move.axis] == move.before
        placements = (*placements[: move.axis], move.after, *placements[move.axis + 1 :])
        function, *arguments = call_of(move, part_shape(shape, placements, mesh.degrees))
        part = function(mesh, part, *arguments)
    return part


def _expected_part(tensor: Tensor, placements: Placements, mesh: ShardingMesh) -> Tensor:
    """A rank's part without padding, by lists of positions that are padded and cut, axis by axis."""
    for dim in range(tensor.dim()):
        positions: list[int | None] = list(range(tensor.shape[dim]))
        for placement, degree, index in zip(placements, mesh.degrees, mesh.indices, strict=True):
            if placement.dim == dim:
                positions += [None] * (-len(positions) % degree)
                size = len(positions) // degree
                positions = positions[index * size : (index + 1) * size]
        real_positions = [position for position in positions if position is not None]
        tensor = tensor.index_select(dim, torch.tensor(real_positions, dtype=torch.int64))
    return tensor


def _random_placements(draw: random.Random, num_dims: int, num_axes: int, combine: AxisPlacement) -> Placements:
    choices = [WHOLE, combine, *map(split, range(num_dims))]
    return tuple(draw.choice(choices) for _ in range(num_axes))


def _parts(full_tensor: Tensor, placements: Placements, mesh: ShardingMesh, seed: int) -> Tensor:
    """This rank's part of a tensor that is the sum, maximum or minimum of the ranks' tensors."""
    generator = torch.Generator().manual_seed(seed)
    value = full_tensor
    for placement, degree, index in zip(placements, mesh.degrees, mesh.indices, strict=True):
        if placement.combine == "sum":
            shares = torch.randint(-9, 9, (degree - 1, *full_tensor.shape), generator=generator).to(full_tensor.dtype)
            value = shares[index - 1] if index else value - shares.sum(0).to(full_tensor.dtype)
        elif placement.combine is not None:
            margin = torch.randint(0, 9, (degree, *full_tensor.shape), generator=generator)[index].to(full_tensor.dtype)
            value = value if index == seed % degree else value + (-margin if placement.combine == "max" else margin)
    splits = tuple(placement if placement.dim is not None else WHOLE for placement in placements)
    return part_of(value, splits, mesh)


def _combine_partials(part: Tensor, placements: Placements, mesh: ShardingMesh) -> Tensor:
    """The full result of the ranks' partial results."""
    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    part = part.clone(memory_format=torch.contiguous_format)
    for placement, group in zip(placements, mesh.groups, strict=True):
        if placement.combine is not None and group is not None:
            dist.all_reduce(part, operations[placement.combine], group=group)
    return part


def move_at_random(degrees: tuple[int, ...], seed: int) -> list[str]:
    """Cases in which a rank's part is wrong."""
    mesh, draw, wrong = ShardingMesh.from_degrees(degrees), random.Random(seed), []
    finder = Moves(Cluster(num_nodes=1, devices_per_node=math.prod(degrees), device="h100"), degrees)
    for case in range(NUM_CASES):
        shape = [draw.choice([1, 2, 3, 4, 5, 7, 8]) for _ in range(draw.randrange(4))]
        dtype = draw.choice([torch.float64, torch.float32, torch.int64, torch.bool])
        combine = WHOLE if dtype == torch.bool else partial(draw.choice(["sum", "max", "min"]))
        source, target = (_random_placements(draw, len(shape), len(degrees), combine) for _ in range(2))
        full_tensor = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(case)).to(dtype)
        source_part = _parts(full_tensor, source, mesh, case)
        filler = torch.full_like(source_part, 1 if dtype == torch.bool else 99)  # padding may hold anything
        strip_padding(filler, shape, source, mesh).copy_(strip_padding(source_part, shape, source, mesh))
        filler_copy = filler.clone()
        _, moves = finder.cheapest(shape, full_tensor.element_size(), source, target)
        part = apply_moves(filler, shape, source, moves, mesh)
        actual = _combine_partials(strip_padding(part, shape, target, mesh), target, mesh)
        expected = _expected_part(full_tensor, target, mesh)
        good = part.shape == part_shape(shape, target, degrees) and part.dtype == dtype
        if not (good and torch.equal(actual, expected) and torch.equal(filler, filler_copy)):
            wrong.append(f"{shape} {dtype} {list(map(str, source))} -> {list(map(str, target))} by {moves}")
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [(2,), (3,), (4,), (2, 2), (1, 2), (2, 1)], ids=str)
def test_parts_after_moves_are_the_wholes(ranks, degrees):
    failures = ranks[math.prod(degrees)].run(move_at_random, degrees, sum(degrees))
    assert failures == [[]] * math.prod(degrees)


def refused_mesh() -> str:
    with pytest.raises(ValueError, match=r"degrees \(3,\) must be the number of ranks \(=2\)") as error:
        ShardingMesh.from_degrees((3,))
    return str(error.value)


def test_a_mesh_of_another_size_is_refused(ranks):
    ranks[2].run(refused_mesh)


NUM_WINDOWS = 40


def windows_at_random(degrees: tuple[int, ...], seed: int) -> list[str]:
    """Cases in which a rank fetches other values than the full tensor has there."""
    mesh, draw, wrong = ShardingMesh.from_degrees(degrees), random.Random(seed), []
    for case in range(NUM_WINDOWS):
        axis, dim = draw.randrange(len(degrees)), draw.randrange(2)
        size = draw.choice([1, 2, 3, 5, 8])
        window = Window(
            draw.randrange(-4, 5), draw.randrange(-4, 5), draw.randrange(1, 7), size, divisor=draw.choice([1, 1, 2, 3])
        )
        dtype = draw.choice([torch.float64, torch.int64, torch.bool])
        shape = [3, 3]
        shape[dim] = size
        full_tensor = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(case)).to(dtype)
        placements = tuple(split(dim) if mesh_axis == axis else WHOLE for mesh_axis in range(len(degrees)))
        part = part_of(full_tensor, placements, mesh)
        value = draw.choice([0, 1])
        actual = fetch(mesh, [part], axis, dim, [window], value)
        start = window.start(mesh.indices[axis])
        expected = [
            full_tensor.select(dim, position) if 0 <= position < size else torch.full((3,), value, dtype=dtype)
            for position in range(start, start + window.length)
        ]
        if not torch.equal(actual, torch.stack(expected, dim)):
            wrong.append(f"{window} of {shape} {dtype} along axis {axis}: {actual}")
    return wrong


def rings(degrees: tuple[int, ...]) -> list[str]:
    """Products and permutations that are wrong."""
    mesh, wrong = ShardingMesh.from_degrees(degrees), []
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
            part_of(
                full_tensor,
                tuple(split(dim) if mesh_axis == axis else WHOLE for mesh_axis in range(len(degrees))),
                mesh,
            )
            for full_tensor, dim in ((first, 1), (second, 2), (product, 1), (product, 2))
        ]
        rows = ring_product(mesh, *parts[:2], axis, "second", 7)
        columns = ring_product(mesh, *parts[:2], axis, "first", 5)
        if not (torch.allclose(rows, parts[2]) and torch.allclose(columns, parts[3])):
            wrong.append(f"product along axis {axis}")
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize("degrees", [(2,), (4,), (2, 2), (1, 2)], ids=str)
def test_windows_are_the_wholes_and_parts_go_round_a_ring(ranks, degrees):
    size = math.prod(degrees)
    assert ranks[size].run(windows_at_random, degrees, 7) == [[]] * size
    assert ranks[size].run(rings, degrees) == [[]] * size
