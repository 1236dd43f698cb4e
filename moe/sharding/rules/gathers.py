"""Operators that read at positions given as data. If the dimension that they read is split, each rank reads the
positions in its part, and has zeros for the others: partial sums."""

from typing import Any

import torch
from torch import fx

from moe.sharding.operands import argument, operands, shape_of
from moe.sharding.placement import COMBINES
from moe.sharding.rules import positions
from moe.sharding.rules.dims import broadcast, factor_dims, sizes_of, unsplit
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Factor, Rule

aten = torch.ops.aten

_TABLE = frozenset({0})


def embedding(node: fx.Node) -> Rule:
    table, index = (shape_of(operand) for operand in operands(node))
    return _select_rule(node, 0, table, index)


def index_select(node: fx.Node) -> Rule:
    table, index = (shape_of(operand) for operand in operands(node))
    return _select_rule(node, argument(node, 1, "dim") % max(1, len(table)), table, index)


def _select_rule(node: fx.Node, dim: int, table: tuple[int, ...], index: tuple[int, ...]) -> Rule:
    """Rule of reading a table along one dimension at an index of any shape."""
    table_dims, index_dims = factor_dims(table), factor_dims(index, "i")
    if not table:
        return Rule(((), index_dims), (factor_dims(tuple(node.meta["val"].shape), "r"),), {}, indices=frozenset({1}))

    def lower(local: LocalCall) -> fx.Node:
        if not (span := span_of(local, table_dims[dim])):
            return local.default()
        if is_embedding:
            return local.call(positions.embedding, *local.parts, span)
        return local.call(positions.select, local.parts[0], dim, local.parts[1], span)

    # with a scalar index, the result has a dimension of size 1 in index_select, and none in embedding
    is_embedding = node.target is aten.embedding.default
    middle = index_dims if index or is_embedding else ((),)
    return Rule(
        operands=(table_dims, index_dims),
        results=((*table_dims[:dim], *middle, *table_dims[dim + 1 :]),),
        sizes=sizes_of((table_dims, table), (index_dims, index)),
        combine=dict.fromkeys(table_dims[dim], "sum"),
        linear=(_TABLE,),
        passes=COMBINES,
        indices=frozenset({1}),
        unmasked=_TABLE,
        lower=lower,
    )


def span_of(local: LocalCall, factors: tuple[Factor, ...]) -> tuple[Any, Any, int] | None:
    """Span of the rank's part of a dimension; None if the dimension is not split."""
    if not factors or not local.axes(factors[0]):
        return None
    return local.first(factors[0]), local.valid(factors[0]), local.rule.sizes[factors[0]]


def gather(node: fx.Node) -> Rule:
    table, index = (shape_of(operand) for operand in operands(node))
    if not table:  # torch treats a scalar as a vector of size 1
        return Rule(((), unsplit(index)), (unsplit(index),), {}, indices=frozenset({1}))
    dim = argument(node, 1, "dim") % len(table)
    unlike = frozenset(number for number, size in enumerate(index) if size != table[number] or number == dim)
    index_dims = tuple(
        ("i",) if number == dim and size > 1 else factors
        for number, (size, factors) in enumerate(zip(index, factor_dims(index, but=unlike), strict=True))
    )
    table_dims = tuple(
        ("t",) if number == dim and size > 1 else factors
        for number, (size, factors) in enumerate(zip(table, factor_dims(table, but=unlike), strict=True))
    )

    def lower(local: LocalCall) -> fx.Node:
        if not (span := span_of(local, table_dims[dim])):
            return local.default()
        return local.call(positions.gather, local.parts[0], dim, local.parts[1], span)

    return Rule(
        operands=(table_dims, index_dims),
        results=(index_dims,),
        sizes=sizes_of((table_dims, table), (index_dims, index)),
        combine={"t": "sum"},
        linear=(_TABLE,),
        passes=COMBINES,
        indices=frozenset({1}),
        unmasked=_TABLE,
        lower=lower,
    )


def take(node: fx.Node) -> Rule:
    """Rule of reading positions of the flattened tensor, which is whole."""
    table, index = (shape_of(operand) for operand in operands(node))
    index_dims = factor_dims(index)
    return Rule((unsplit(table), index_dims), (index_dims,), sizes_of((index_dims, index)), linear=(_TABLE,),
                passes=COMBINES, indices=frozenset({1}))  # fmt: skip


class AdvancedIndexing:
    """Dims of `tensor[indices]`. As in numpy, the dimensions of the broadcast indices replace the indexed dimensions if
    these are adjacent, and come first otherwise."""

    def __init__(self, node: fx.Node) -> None:
        indices = argument(node, 1, "indices")
        self.shape = shape_of(operands(node)[0])
        self.indices = [*indices, *[None] * (len(self.shape) - len(indices))]
        dims = [dim for dim, index in enumerate(self.indices) if index is not None]
        shapes = [shape_of(index) for index in self.indices if index is not None]
        self.are_masks = any(index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)
                             for index in indices)  # fmt: skip
        if self.are_masks:
            return
        self.index_shape = tuple(torch.broadcast_shapes(*shapes))
        self.shared_dims = factor_dims(self.index_shape, "i")
        self.indices_dims = [broadcast(self.shared_dims, self.index_shape, shape) for shape in shapes]
        self.table_dims: Dims = tuple(
            (f"t{dim}" if dim in dims else f"d{dim}",) if size > 1 else () for dim, size in enumerate(self.shape)
        )
        is_adjacent = dims == list(range(dims[0], dims[-1] + 1))
        begin = dims[0] if is_adjacent else 0
        other_dims = [dim for dim in range(len(self.shape)) if dim not in dims]
        self.num_trailing_dims = len(other_dims) - begin
        """Number of dimensions of the result after those of the indices."""
        self.result_dims = (
            *(self.table_dims[dim] for dim in other_dims[:begin]),
            *self.shared_dims,
            *(self.table_dims[dim] for dim in other_dims[begin:]),
        )
        self.result_shape = (
            *(self.shape[dim] for dim in other_dims[:begin]),
            *self.index_shape,
            *(self.shape[dim] for dim in other_dims[begin:]),
        )
        self.indexed_factors = [factor for dim in dims for factor in self.table_dims[dim]]
        """Factors of the indexed dimensions."""

    @property
    def sizes(self) -> dict[Factor, int]:
        return sizes_of((self.table_dims, self.shape), (self.shared_dims, self.index_shape))

    def spans(self, local: LocalCall) -> list[tuple[int, Any]]:
        """(dimension, span) of indexed dimensions that are split."""
        return [
            (dim, span)
            for dim, index in enumerate(self.indices)
            if index is not None and (span := span_of(local, self.table_dims[dim])) is not None
        ]

    def local_indices(self, local: LocalCall) -> list[fx.Node | None]:
        parts = iter(local.parts[1:])
        return [None if index is None else next(parts) for index in self.indices]


def index(node: fx.Node) -> Rule:
    indexing = AdvancedIndexing(node)
    assert not indexing.are_masks, "the result's shape would depend on the data"

    def lower(local: LocalCall) -> fx.Node:
        if not (spans := indexing.spans(local)):
            return local.default()
        indices = indexing.local_indices(local)
        return local.call(positions.index, local.parts[0], indices, spans, indexing.num_trailing_dims)

    return Rule(
        operands=(indexing.table_dims, *indexing.indices_dims),
        results=(indexing.result_dims,),
        sizes=indexing.sizes,
        combine=dict.fromkeys(indexing.indexed_factors, "sum"),
        linear=(_TABLE,),
        passes=COMBINES,
        indices=frozenset(range(1, len(operands(node)))),
        unmasked=_TABLE,
        lower=lower,
    )


RULES = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.take.default: take,
}
