"""Views: the same elements in another shape."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from moe.sharding.exchange.halo import Window, fetch, moved_positions
from moe.sharding.operands import argument, operands, shape_of
from moe.sharding.placement import COMBINES
from moe.sharding.rules.dims import broadcast, factor_dims, sizes_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Exchange, Rule

aten = torch.ops.aten


def common_factors(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors that both shapes of the same elements consist of, and their sizes: from the left, dimensions are grouped
    until both sides have as many elements, and a group is refined where one side divides the other. Without elements
    there are none."""
    if 0 in before:
        return ((),) * len(before), ((),) * len(after), {}
    sizes: dict[str, int] = {}
    factors: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    next_dims, remaining = [0, 0], [1, 1]
    shapes = (before, after)

    while True:
        for side in (0, 1):
            while remaining[side] == 1 and next_dims[side] < len(shapes[side]):
                remaining[side] = shapes[side][next_dims[side]]
                next_dims[side] += 1
        if remaining[0] == 1 and remaining[1] == 1:
            break
        name = f"v{len(sizes)}"
        if 1 in remaining:  # the other side has only dimensions of size 1 left
            break
        divisor = math.gcd(remaining[0], remaining[1])
        if divisor == min(remaining):
            # the smaller side's dimension, or what is left of it, is the major part of the larger one's
            sizes[name] = divisor
            for side in (0, 1):
                factors[side][next_dims[side] - 1].append(name)
                remaining[side] //= divisor
            continue
        # neither divides the other: these dimensions stay together, up to where both have as many elements
        totals = list(remaining)
        first = [next_dims[0] - 1, next_dims[1] - 1]
        while totals[0] != totals[1]:
            side = 0 if totals[0] < totals[1] else 1
            totals[side] *= shapes[side][next_dims[side]]
            next_dims[side] += 1
        for side in (0, 1):
            for dim in range(first[side], next_dims[side]):
                factors[side][dim].append(f"whole{first[side]}.{side}.{dim}")
            remaining[side] = 1
        for side in (0, 1):
            for dim in range(first[side], next_dims[side]):
                sizes[f"whole{first[side]}.{side}.{dim}"] = shapes[side][dim]
    return tuple(map(tuple, factors[0])), tuple(map(tuple, factors[1])), sizes


def view(node: fx.Node) -> Rule:
    shapes = shape_of(operands(node)[0]), tuple(node.meta["val"].shape)
    before, after, sizes = common_factors(*shapes)
    whole_factors = frozenset(factor for factor in sizes if factor.startswith("whole"))
    return Rule(
        (before,),
        (after,),
        sizes,
        whole_factors=whole_factors,
        linear=(frozenset({0}),),
        passes=COMBINES,
        work="none",
        exchanges=tuple(_recut(node, *group) for group in _groups(*shapes)) if 0 not in shapes[0] else (),
        lower=_view,
    )


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Shortest runs of dimensions of both shapes that have as many elements, where that is not one dimension each. None
    of them begins with dimensions of size 1, which belong to no run."""
    shapes = (before, after)
    dims = tuple([dim for dim, size in enumerate(shape) if size != 1] for shape in shapes)
    while dims[0] and dims[1]:
        runs = ([dims[0].pop(0)], [dims[1].pop(0)])
        while (totals := [math.prod(shapes[number][dim] for dim in runs[number]) for number in (0, 1)])[0] != totals[1]:
            side = 0 if totals[0] < totals[1] else 1
            runs[side].append(dims[side].pop(0))
        if len(runs[0]) + len(runs[1]) > 2:
            yield runs


def _recut(node: fx.Node, before: list[int], after: list[int]) -> Exchange:
    """The first dimension of a run is split before and after, and what lies between other boundaries moves."""
    operand_shape, result = shape_of(operands(node)[0]), tuple(node.meta["val"].shape)
    total = math.prod(operand_shape[dim] for dim in before)

    def length(shape: Sequence[int], dim: int, degree: int) -> int:
        return -(-shape[dim] // degree) * (total // shape[dim])

    def window(degree: int) -> Window:
        count = length(result, after[0], degree)
        return Window(0, count, count, total)

    def moved_bytes(degree: int) -> float:
        num_positions = moved_positions(window(degree), length(operand_shape, before[0], degree), degree)
        return num_positions * node.meta["val"].dtype.itemsize * math.prod(operand_shape) / total

    def lower(local: LocalCall, axis: int) -> fx.Node:
        shape = local.operand_part_shape(0)
        flat = [*shape[: before[0]], math.prod(shape[before[0] : before[-1] + 1]), *shape[before[-1] + 1 :]]
        rows = local.call(aten.reshape.default, local.parts[0], flat)
        rows = local.runtime(fetch, [rows], axis, before[0], [window(local.degrees[axis])])
        return local.call(aten.reshape.default, rows, list(local.part_shape()))

    return Exchange(f"boundaries d{before[0]}", (before[0],), (after[0],), moved_bytes, lower)


def _view(local: LocalCall) -> fx.Node:
    return local.call(aten.reshape.default, local.parts[0], list(local.part_shape()))


def bits(node: fx.Node) -> Rule:
    """The same memory as another dtype: of one of another width, the last dimension has another length."""
    shape, result_shape = shape_of(operands(node)[0]), tuple(node.meta["val"].shape)
    dims: Dims = tuple((f"d{dim}",) if size == result_shape[dim] > 1 else () for dim, size in enumerate(shape))
    return Rule((dims,), (dims,), sizes_of((dims, shape)), work="none", lower=_bits)


def _bits(local: LocalCall) -> fx.Node:
    part = local.call(aten.clone.default, local.parts[0], memory_format=torch.contiguous_format)
    return local.call(aten.view.dtype, part, local.node.args[1])


def permute(node: fx.Node) -> Rule:
    shape, order = shape_of(operands(node)[0]), argument(node, 1, "dims")
    dims = factor_dims(shape)
    return Rule((dims,), (tuple(dims[dim] for dim in order),),
                sizes_of((dims, shape)), linear=(frozenset({0}),), passes=COMBINES, work="none")  # fmt: skip


def expand(node: fx.Node) -> Rule:
    """Dimensions that become larger, and new ones, are made on each rank as long as it has them."""
    before, after = shape_of(operands(node)[0]), tuple(node.meta["val"].shape)
    dims = factor_dims(after)
    return Rule((broadcast(dims, after, before),), (dims,), sizes_of((dims, after)), linear=(frozenset({0}),),
                passes=COMBINES, work="none", lower=_expand)  # fmt: skip


def _expand(local: LocalCall) -> fx.Node:
    return local.call(aten.expand.default, local.parts[0], list(local.part_shape()))


RULES = {
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.reshape.default: view,
    aten.squeeze.default: view,
    aten.squeeze.dim: view,
    aten.squeeze.dims: view,
    aten.unsqueeze.default: view,
    aten.permute.default: permute,
    aten.view.dtype: bits,
    aten.expand.default: expand,
}
