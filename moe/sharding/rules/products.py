"""Matrix products."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import fx

from moe.sharding.exchange.ring import ring_product
from moe.sharding.operands import operands, shape_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Exchange, Rule

aten = torch.ops.aten


def _dims_of(letters: str, shape: tuple[int, ...]) -> Dims:
    """Factors by letters, one for each dimension; dimensions of size 1 have none."""
    return tuple((letter,) if size > 1 else () for letter, size in zip(letters, shape, strict=True))


def product(node: fx.Node) -> Rule:
    """Rule of `mm`, `bmm`, `addmm` and `baddbmm`."""
    inputs = operands(node)
    first, second = inputs[-2:]
    rows, columns = ("bmk", "bkn") if len(shape_of(first)) == 3 else ("mk", "kn")
    result = rows[:-1] + "n"
    sizes = dict(zip(rows, shape_of(first), strict=True)) | dict(zip(columns, shape_of(second), strict=True))
    letters = [rows, columns]
    if len(inputs) == 3:  # the added tensor is broadcast
        letters.insert(0, result[len(result) - len(shape_of(inputs[0])) :])
    first_operand, second_operand = len(inputs) - 2, len(inputs) - 1
    dims = tuple(
        _dims_of(operand_letters, shape_of(operand)) for operand_letters, operand in zip(letters, inputs, strict=True)
    )
    return Rule(
        operands=dims,
        results=(_dims_of(result, tuple(node.meta["val"].shape)),),
        sizes={factor: size for factor, size in sizes.items() if size > 1},
        combine={"k": "sum"},
        linear=(frozenset({first_operand}), frozenset({second_operand})),
        added=frozenset({0}) if len(inputs) == 3 else frozenset(),
        work="product",
        exchanges=tuple(_rings(inputs, dims, result)),
    )


def _rings(inputs: Sequence[fx.Node], dims: Sequence[Dims], result: str) -> Iterator[Exchange]:
    """Exchanges of a product whose first operand is split in rows and whose second one is split in columns: one of them
    is passed around a ring."""
    first_operand, second_operand = len(inputs) - 2, len(inputs) - 1

    def place(letter: str, number: int) -> int | None:
        return next((dim for dim, factors in enumerate(dims[number]) if letter in factors), None)

    rows, columns = place("m", first_operand), place("n", second_operand)
    if rows is None or columns is None:
        return

    def ring(side: Literal["first", "second"], factor: str, operand: fx.Node, dim: int) -> Exchange:
        fake = operand.meta["val"]
        size, row_bytes = fake.shape[dim], fake.dtype.itemsize * math.prod(fake.shape) / fake.shape[dim]
        return Exchange(
            f"ring, {side} passed",
            operands=(*(place(factor, number) for number in range(first_operand)), rows, columns),
            results=(result.index(factor),),
            moved_bytes=lambda degree: (degree - 1) * -(-size // degree) * row_bytes,
            lower=lambda local, axis: _ring(local, axis, side, size),
            kind="ring",
        )

    yield ring("second", "m", inputs[second_operand], columns)
    yield ring("first", "n", inputs[first_operand], rows)


def _ring(local: LocalCall, axis: int, side: str, size: int) -> fx.Node:
    *addends, first, second = local.parts
    matrix_product = local.runtime(ring_product, first, second, axis, side, size)
    if not addends:
        return matrix_product
    scales = (("beta", addends[0]), ("alpha", matrix_product))
    terms = [
        part if local.node.kwargs.get(name, 1) == 1 else local.call(aten.mul.Scalar, part, local.node.kwargs[name])
        for name, part in scales
    ]
    return local.call(aten.add.Tensor, *terms)


RULES = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: product,
    aten.baddbmm.default: product,
}
