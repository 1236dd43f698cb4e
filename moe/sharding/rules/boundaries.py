"""Operators that move the boundaries between parts: slices, concatenations, padding, reversal, rotation.

Dimensions that the operator does not change are ordinary factors. Along the others, a rank's positions of the result
are windows of the operands, which are split, too (GShard, arXiv 2006.16668, section 3.3).
"""

from collections.abc import Callable, Sequence

import torch
from torch import fx

from moe.sharding.exchange import halo
from moe.sharding.exchange.halo import Window
from moe.sharding.operands import argument, operands, shape_of
from moe.sharding.placement import COMBINES
from moe.sharding.rules.dims import factor_dims, sizes_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Exchange, Rule

aten = torch.ops.aten

_ONE = (frozenset({0}),)


def moving(
    node: fx.Node,
    dim: int,
    sources: Sequence[int],
    windows: Callable[[int], tuple[Window, ...]],
    finish: Callable[[LocalCall, fx.Node], fx.Node],
    value: float = 0,
) -> Exchange:
    """Exchange after which each rank has the windows of operands that its positions of the result need.
    `windows(number of positions)` returns the windows, and `sources` the operand of each. Operands without a split
    window are whole."""
    inputs, result = operands(node), node.meta["val"]
    split_operands = {source for source, window in zip(sources, windows(1), strict=True) if window.is_split}

    def moved_bytes(degree: int) -> float:
        pairs = zip(sources, windows(-(-result.shape[dim] // degree)), strict=True)
        return sum(
            halo.moved_bytes(shape_of(inputs[source]), dim, result.dtype.itemsize, window, degree)
            for source, window in pairs
        )

    def lower(local: LocalCall, axis: int) -> fx.Node:
        parts = [
            part
            if fake.meta["val"].dtype == result.dtype
            else local.call(aten._to_copy.default, part, dtype=result.dtype)
            for part, fake in zip(local.parts, inputs, strict=True)
        ]
        part_windows = windows(local.part_shape()[dim])
        rows = local.runtime(halo.fetch, [parts[source] for source in sources], axis, dim, part_windows, value)
        return finish(local, rows)

    return Exchange(
        f"boundaries d{dim}",
        tuple(dim if number in split_operands else None for number in range(len(inputs))),
        (dim,),
        moved_bytes,
        lower,
    )


def _as_fetched(local: LocalCall, rows: fx.Node) -> fx.Node:
    return rows


def _span(node: fx.Node, number: int, size: int) -> range:
    """Positions of a slice whose start is argument `number`."""
    bounds = [argument(node, number + index, name) for index, name in enumerate(("start", "end", "step"))]
    return range(size)[slice(*bounds)]


def slice_(node: fx.Node) -> Rule:
    (x,) = operands(node)
    shape, result = shape_of(x), tuple(node.meta["val"].shape)
    dim = argument(node, 1, "dim", 0) % len(shape)
    span = _span(node, 2, shape[dim])
    if len(span) == shape[dim]:
        dims = factor_dims(shape)
        return Rule((dims,), (dims,), sizes_of((dims, shape)), linear=_ONE, passes=COMBINES, work="none",
                    lower=lambda local: local.parts[0])  # fmt: skip
    if len(span) == 1 and shape[dim] > 1:
        return _one_position(node, dim, span[0], keep=True)

    def windows(size: int) -> tuple[Window, ...]:
        length = max(0, span.step * (size - 1) + 1)
        return (Window(span.start, span.step * size, length, high=span[-1] + 1 if span else 0, low=span.start),)

    def finish(local: LocalCall, rows: fx.Node) -> fx.Node:
        return rows if span.step == 1 else local.call(aten.slice.Tensor, rows, dim, 0, None, span.step)

    dims = factor_dims(shape, but=frozenset({dim}))
    exchanges = (moving(node, dim, [0], windows, finish),) if len(span) > 1 else ()
    return Rule((dims,), (factor_dims(result, but=frozenset({dim})),), sizes_of((dims, shape)), linear=_ONE,
                passes=COMBINES, work="none", exchanges=exchanges)  # fmt: skip


def select(node: fx.Node) -> Rule:
    shape = shape_of(operands(node)[0])
    dim, index = argument(node, 1, "dim") % len(shape), argument(node, 2, "index")
    return _one_position(node, dim, index % shape[dim], keep=False)


def _one_position(node: fx.Node, dim: int, position: int, keep: bool) -> Rule:
    """Rule of an operator that reads one position. If the dimension is split, one rank has the position and the others
    have zeros: partial sums."""
    shape, name = shape_of(operands(node)[0]), f"d{dim}"
    dims = factor_dims(shape)
    result = (*dims[:dim], *(((),) if keep else ()), *dims[dim + 1 :])

    def lower(local: LocalCall) -> fx.Node:
        if not local.axes(name):
            return local.default()
        row = local.call(halo.select_position, local.parts[0], dim, local.first(name), local.valid(name), position)
        return row if keep else local.call(aten.squeeze.dim, row, dim)

    return Rule((dims,), (result,), sizes_of((dims, shape)), {name: "sum"}, linear=_ONE, passes=COMBINES,
                unmasked=frozenset({0}), work="none", lower=lower)  # fmt: skip


def slice_scatter(node: fx.Node) -> Rule:
    shape = shape_of(operands(node)[0])
    dim = argument(node, 2, "dim", 0) % len(shape)
    span = _span(node, 3, shape[dim])

    def windows(size: int) -> tuple[Window, ...]:
        return (
            Window(0, size, size, high=span.start),
            Window(-span.start, size, size, high=len(span)),
            Window(0, size, size, high=shape[dim], low=span.stop),
        )

    both_split = span.step == 1 and 1 < len(span) < shape[dim]
    exchanges = (moving(node, dim, [0, 1, 0], windows, _as_fetched),) if both_split else ()
    return _scatter_rule(node, dim, span, exchanges)


def select_scatter(node: fx.Node) -> Rule:
    shape = shape_of(operands(node)[0])
    dim, index = argument(node, 2, "dim") % len(shape), argument(node, 3, "index")
    return _scatter_rule(node, dim, range(index % shape[dim], index % shape[dim] + 1), ())


def _scatter_rule(node: fx.Node, dim: int, span: range, exchanges: tuple[Exchange, ...]) -> Rule:
    """Rule of an operator that writes the second operand into the first. All ranks have the second operand, and each
    writes what falls in its part of the first."""
    x, src = operands(node)
    shape, name = shape_of(x), f"d{dim}"
    dims, src_dims = factor_dims(shape), factor_dims(shape, but=frozenset({dim}))
    is_slice = len(shape_of(src)) == len(shape)
    if not is_slice:
        src_dims = (*src_dims[:dim], *src_dims[dim + 1 :])

    def lower(local: LocalCall) -> fx.Node:
        if not local.axes(name):
            return local.default()
        part, rows = local.parts
        rows = rows if is_slice else local.call(aten.unsqueeze.default, rows, dim)
        return local.call(halo.write_slice, part, rows, dim, local.first(name), span.start, span.step)

    return Rule((dims, src_dims), (dims,), sizes_of((dims, shape)), linear=(frozenset({0, 1}),), passes=COMBINES,
                exchanges=exchanges, lower=lower)  # fmt: skip


def cat(node: fx.Node) -> Rule:
    """Rule of concatenation. An operand of length 1 is whole; an empty vector next to tensors with more dimensions
    is ignored."""
    inputs, result = operands(node), tuple(node.meta["val"].shape)
    dim = argument(node, 1, "dim", 0) % len(result)
    shapes = [shape_of(operand) for operand in inputs]
    sources = [number for number, shape in enumerate(shapes) if len(shape) == len(result)]
    begins = [sum(shapes[source][dim] for source in sources[:index]) for index in range(len(sources))]

    def windows(size: int) -> tuple[Window, ...]:
        return tuple(
            Window(-begin, size, size, shapes[number][dim], is_split=shapes[number][dim] > 1)
            for number, begin in zip(sources, begins, strict=True)
        )

    dims = factor_dims(result, but=frozenset({dim}))
    return Rule(
        tuple(dims if number in sources else ((),) for number in range(len(inputs))),
        (dims,),
        sizes_of((dims, result)),
        linear=(frozenset(range(len(inputs))),),
        passes=COMBINES,
        exchanges=(moving(node, dim, sources, windows, _as_fetched),) if result[dim] > 1 else (),
    )


def constant_pad(node: fx.Node) -> Rule:
    shape, result = shape_of(operands(node)[0]), tuple(node.meta["val"].shape)
    pads, value = list(argument(node, 1, "pad")), argument(node, 2, "value", 0)
    ends = {len(shape) - 1 - index // 2: (pads[index], pads[index + 1]) for index in range(0, len(pads), 2)}
    padded_dims = frozenset(dim for dim, pad in ends.items() if pad != (0, 0))

    def exchange_along(dim: int) -> Exchange:
        def finish(local: LocalCall, rows: fx.Node) -> fx.Node:
            other_pads = list(pads)
            other_pads[2 * (len(shape) - 1 - dim) : 2 * (len(shape) - dim)] = [0, 0]
            return local.call(aten.constant_pad_nd.default, rows, other_pads, value) if any(other_pads) else rows

        def windows(size: int) -> tuple[Window, ...]:
            return (Window(-ends[dim][0], size, size, shape[dim]),)

        return moving(node, dim, [0], windows, finish, value)

    dims = factor_dims(shape, but=padded_dims)
    exchanges = tuple(exchange_along(dim) for dim in sorted(padded_dims) if shape[dim] > 1 and result[dim] > 1)
    return Rule((dims,), (dims,), sizes_of((dims, shape)), linear=_ONE if value == 0 else (),
                exchanges=exchanges)  # fmt: skip


def flip(node: fx.Node) -> Rule:
    shape = shape_of(operands(node)[0])
    flipped_dims = frozenset(dim % len(shape) for dim in argument(node, 1, "dims"))

    def exchange_along(dim: int) -> Exchange:
        def windows(size: int) -> tuple[Window, ...]:
            return (Window(shape[dim] - size, -size, size, shape[dim]),)

        return moving(
            node, dim, [0], windows, lambda local, rows: local.call(aten.flip.default, rows, sorted(flipped_dims))
        )

    dims = factor_dims(shape, but=flipped_dims)
    return Rule((dims,), (dims,), sizes_of((dims, shape)), linear=_ONE, passes=COMBINES,
                exchanges=tuple(exchange_along(dim) for dim in sorted(flipped_dims) if shape[dim] > 1))  # fmt: skip


def roll(node: fx.Node) -> Rule:
    """Rule of `roll`. Without dimensions, it rotates the flattened tensor: nothing is split."""
    shape = shape_of(operands(node)[0])
    amounts, listed_dims = list(argument(node, 1, "shifts")), argument(node, 2, "dims", [])
    shifts: dict[int, int] = {}
    for dim, shift in zip(listed_dims, amounts, strict=False):
        shifts[dim % len(shape)] = shifts.get(dim % len(shape), 0) + shift
    rolled_dims = frozenset(dim for dim in range(len(shape)) if not listed_dims or dim in shifts)

    def exchange_along(dim: int) -> Exchange:
        size, shift = shape[dim], shifts[dim] % max(1, shape[dim])

        def windows(count: int) -> tuple[Window, ...]:
            return (
                Window(size - shift, count, count, high=size, low=size - shift),
                Window(-shift, count, count, high=size - shift),
            )

        def finish(local: LocalCall, rows: fx.Node) -> fx.Node:
            other_dims = [other_dim for other_dim in sorted(shifts) if other_dim != dim]
            return (
                local.call(aten.roll.default, rows, [shifts[other_dim] for other_dim in other_dims], other_dims)
                if other_dims
                else rows
            )

        return moving(node, dim, [0, 0], windows, finish)

    dims = factor_dims(shape, but=rolled_dims)
    return Rule((dims,), (dims,), sizes_of((dims, shape)), linear=_ONE, passes=COMBINES,
                exchanges=tuple(exchange_along(dim) for dim in sorted(shifts) if shape[dim] > 1))  # fmt: skip


def unfold(node: fx.Node) -> Rule:
    """Rule of `unfold`: overlapping windows along a new last dimension."""
    shape, result = shape_of(operands(node)[0]), tuple(node.meta["val"].shape)
    dim, size, step = (argument(node, 1 + index, name) for index, name in enumerate(("dimension", "size", "step")))
    dim %= max(1, len(shape))

    def windows(count: int) -> tuple[Window, ...]:
        return (Window(0, step * count, step * (count - 1) + size, shape[dim]),)

    dims = factor_dims(shape, but=frozenset({dim}))
    can_move = shape and shape[dim] > 1 and result[dim] > 1
    return Rule(
        (dims,),
        ((*dims, ()),),
        sizes_of((dims, shape)),
        linear=_ONE,
        passes=COMBINES,
        work="none",
        exchanges=(
            moving(node, dim, [0], windows, lambda local, rows: local.call(aten.unfold.default, rows, dim, size, step)),
        )
        if can_move
        else (),
    )


def diagonal(node: fx.Node) -> Rule:
    """Rule of reading or writing a diagonal, whose two dimensions are whole."""
    shape, scatters = shape_of(operands(node)[0]), node.target is aten.diagonal_scatter.default
    begin = 3 if scatters else 2
    diagonal_dims = frozenset(argument(node, begin + index, f"dim{index + 1}", index) % len(shape) for index in (0, 1))
    dims = factor_dims(shape, but=diagonal_dims)
    dims_of_diagonal: Dims = (*(factors for dim, factors in enumerate(dims) if dim not in diagonal_dims), ())
    if scatters:
        return Rule(
            (dims, dims_of_diagonal), (dims,), sizes_of((dims, shape)), linear=(frozenset({0, 1}),), passes=COMBINES
        )
    return Rule((dims,), (dims_of_diagonal,), sizes_of((dims, shape)), linear=_ONE, passes=COMBINES, work="none")


RULES = {
    aten.slice.Tensor: slice_,
    aten.select.int: select,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.cat.default: cat,
    aten.constant_pad_nd.default: constant_pad,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.unfold.default: unfold,
    aten.diagonal.default: diagonal,
    aten.diagonal_scatter.default: diagonal,
}
