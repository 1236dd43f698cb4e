"""Grouped matrix products, such as those of experts: rows are sorted by group, each group has its own matrix, and
`ends` has the row at which each group ends. If groups are split, each rank multiplies the rows of its groups: partial
sums."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moe.sharding.operands import operands, shape_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Rule

aten = torch.ops.aten

_ROWS: Dims = (("t",), ("m",))
_MATRICES: Dims = (("e",), ("m",), ("n",))
_ENDS: Dims = ((),)
_PRODUCTS: Dims = (("t",), ("n",))


def _rule(
    node: fx.Node,
    operand_dims: Sequence[Dims],
    results: Sequence[Dims],
    function: Callable[..., Any],
    linear: Sequence[int],
) -> Rule:
    sizes: dict[str, int] = {}
    for operand, dims in zip(operands(node), operand_dims, strict=True):
        for factors, size in zip(dims, shape_of(operand), strict=True):
            sizes |= dict.fromkeys(factors, size)

    def lower(local: LocalCall) -> fx.Node:
        return local.call(function, *local.parts, local.first("t"), local.first("e"), local.size("e"))

    sizes.setdefault("e", shape_of(operands(node)[operand_dims.index(_ENDS)])[0])
    return Rule(
        operands=tuple(operand_dims),
        results=tuple(results),
        sizes=sizes,
        combine=dict.fromkeys(("t", "m", "n", "e"), "sum"),
        linear=tuple(frozenset({operand}) for operand in linear),
        work="product",
        flops=2.0 / sizes["e"],  # each row is in one group
        lower=lower,
    )


def grouped_mm(node: fx.Node) -> Rule:
    """`_grouped_mm` of rows `[t, m]` and matrices `[e, m, n]`, or of columns `[m, t]` and rows `[t, n]`."""
    first, second = (shape_of(operand) for operand in operands(node)[:2])
    if len(node.args) < 3 or node.args[2] is None or len(first) != 2 or any(node.args[3:]) or node.kwargs:
        return Rule(
            operands=tuple(((),) * len(shape_of(operand)) for operand in operands(node)),
            results=(((),) * len(node.meta["val"].shape),), sizes={}, work="product",
        )  # fmt: skip
    if len(second) == 3:
        return _rule(node, (_ROWS, _MATRICES, _ENDS), (_PRODUCTS,), product, (0, 1))
    columns: Dims = (("m",), ("t",))
    return _rule(node, (columns, _PRODUCTS, _ENDS), (_MATRICES,), product_by_columns, (0, 1))


def fallback(node: fx.Node) -> Rule:
    """The operator that transformers registers for devices without torch's own."""
    return _rule(node, (_ROWS, _MATRICES, _ENDS), (_PRODUCTS,), product, (0, 1))


def fallback_backward(node: fx.Node) -> Rule:
    operand_dims = (_ROWS, _MATRICES, _ENDS, _PRODUCTS)
    return _rule(node, operand_dims, (_ROWS, _MATRICES), gradients, (3,))


def _groups(
    ends: Tensor, num_rows: int, first_row: int, first_group: int, num_groups: int
) -> Iterator[tuple[int, slice]]:
    """(index of a group on this rank, its rows on this rank) for groups that have rows here."""
    bounds = [0, *ends.tolist()]
    for number in range(min(num_groups, len(bounds) - 1 - first_group)):
        begin, end = bounds[first_group + number], bounds[first_group + number + 1]
        begin, end = max(begin - first_row, 0), min(end - first_row, num_rows)
        if begin < end:
            yield number, slice(begin, end)


def product(rows: Tensor, matrices: Tensor, ends: Tensor, first_row: int, first_group: int, num_groups: int) -> Tensor:
    """`[t, n]`: rows `[t, m]` times the matrices `[e, m, n]` of their groups; zeros for rows of other ranks' groups.
    `ends` `[E]` is of all groups, in global rows."""
    results = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for number, group_rows in _groups(ends, rows.shape[0], first_row, first_group, num_groups):
        torch.mm(rows[group_rows], matrices[number], out=results[group_rows])
    return results


def product_by_columns(
    columns: Tensor, rows: Tensor, ends: Tensor, first_row: int, first_group: int, num_groups: int
) -> Tensor:
    """`[e, m, n]`: for each group, its columns of `[m, t]` times its rows of `[t, n]`."""
    results = rows.new_zeros(num_groups, columns.shape[0], rows.shape[1])
    for number, group_rows in _groups(ends, rows.shape[0], first_row, first_group, num_groups):
        torch.mm(columns[:, group_rows], rows[group_rows], out=results[number])
    return results


def gradients(
    rows: Tensor, matrices: Tensor, ends: Tensor, gradient: Tensor, first_row: int, first_group: int, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Gradients of `product` with respect to rows and matrices."""
    place = (first_row, first_group, num_groups)
    return (
        product(gradient, matrices.transpose(1, 2), ends, *place),
        product_by_columns(rows.t(), gradient, ends, *place),
    )


RULES = {aten._grouped_mm.default: grouped_mm}

BY_NAME = {
    "transformers.grouped_mm_fallback.default": fallback,
    "transformers.grouped_mm_fallback_backward.default": fallback_backward,
}
"""Rules of operators that a library registers when it is imported."""
