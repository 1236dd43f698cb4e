"""Matrix products."""

import torch
from torch import fx

from moe.sharding.operands import operands, shape_of
from moe.sharding.rules.rule import Dims, Rule

aten = torch.ops.aten


def dims_of(letters: str, shape: tuple[int, ...]) -> Dims:
    """Factors by letters, one a dimension; a dot, or a dimension of size 1, has none."""
    return tuple(
        (letter,) if letter != "." and size > 1 else () for letter, size in zip(letters, shape, strict=True)
    )


def product(node: fx.Node) -> Rule:
    """`mm`, `bmm`, and both with something added."""
    given = operands(node)
    first, second = given[-2:]
    rows, columns = ("bmk", "bkn") if len(shape_of(first)) == 3 else ("mk", "kn")
    result = rows[:-1] + "n"
    sizes = dict(zip(rows, shape_of(first), strict=True)) | dict(zip(columns, shape_of(second), strict=True))
    letters = [rows, columns]
    if len(given) == 3:  # what is added broadcasts
        letters.insert(0, result[len(result) - len(shape_of(given[0])) :])
    of_first, of_second = len(given) - 2, len(given) - 1
    return Rule(
        operands=tuple(
            dims_of(each, shape_of(operand)) for each, operand in zip(letters, given, strict=True)
        ),
        results=(dims_of(result, tuple(node.meta["val"].shape)),),
        sizes={factor: size for factor, size in sizes.items() if size > 1},
        combine={"k": "sum"},
        linear=(frozenset({of_first}), frozenset({of_second})),
        added=frozenset({0}) if len(given) == 3 else frozenset(),
        work="product",
    )


RULES = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.addmm.default: product,
    aten.baddbmm.default: product,
}
