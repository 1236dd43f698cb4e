"""Operators that write at positions given as data. If the dimension that they write is split, each rank writes the
positions in its part. If written values are summed and are split, each rank writes its values: partial sums."""

import math
from typing import Any

import torch
from torch import fx

from moe.sharding.operands import argument, operands, shape_of
from moe.sharding.placement import Combine
from moe.sharding.rules import positions
from moe.sharding.rules.dims import broadcast, factor_dims, sizes_of, unsplit
from moe.sharding.rules.gathers import AdvancedIndexing, span_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Rule

aten = torch.ops.aten

_COMBINE: dict[str, Combine] = {"sum": "sum", "amax": "max", "amin": "min"}


def _linear_in(*operands: int) -> tuple[frozenset[int], ...]:
    return (frozenset(operands), *(frozenset({operand}) for operand in operands))


def _is_bool(node: fx.Node) -> bool:
    return node.meta["val"].dtype == torch.bool


def _lower_scatter(node: fx.Node, dim: int, self_dims: Dims) -> Any:
    """The local form of `operator(self, dim, index, ...)`."""

    def lower(local: LocalCall) -> fx.Node:
        if not self_dims or not (span := span_of(local, self_dims[dim])):
            return local.default()
        (part, _, index, *values), options = local.arguments()
        return local.call(positions.write, node.target, part, dim, index, span, *values, **options)

    return lower


def scatter(node: fx.Node) -> Rule:
    """Rule of every `scatter`. The target, the index and the source, if there is one, have the same number of
    dimensions."""
    shape, index, *source = (shape_of(operand) for operand in operands(node))
    dim = argument(node, 1, "dim") % max(1, len(shape))
    tensors = (shape, index, *source)
    alike = {
        number
        for number in range(len(shape))
        if number != dim and len({tensor_shape[number] for tensor_shape in tensors}) == 1
    }
    same_length = dim < len(shape) and all(source_shape[dim] == index[dim] for source_shape in source)

    def dims(tensor_shape: tuple[int, ...], factor: str | None) -> Dims:
        return tuple(
            () if size < 2 else (factor,) if number == dim and factor else (f"d{number}",) if number in alike else ()
            for number, size in enumerate(tensor_shape)
        )

    index_factor = "i" if same_length else None
    self_dims, index_dims = dims(shape, "t"), dims(index, index_factor)
    kind = _reduction(node)
    combine = _COMBINE.get(kind or "") if not _is_bool(node) else None
    if not argument(node, 5, "include_self", True):
        combine = None
    linear = _linear_in(0, 2) if source and (combine or kind is None) and not _is_bool(node) else ()
    return Rule(
        operands=(self_dims, index_dims, *(dims(source_shape, index_factor) for source_shape in source)),
        results=(self_dims,),
        sizes=sizes_of((self_dims, shape), (index_dims, index)),
        combine={"i": combine} if combine and source else {},
        linear=linear,
        passes=frozenset({combine or "sum"}),
        added=frozenset({0, 2}) if source else frozenset(),
        indices=frozenset({1}),
        lower=_lower_scatter(node, dim, self_dims),
    )


def _reduction(node: fx.Node) -> str | None:
    """Reduction of written values with earlier ones; None where they replace them."""
    match node.target:
        case aten.scatter_add.default:
            return "sum"
        case aten.scatter_reduce.two:
            return str(argument(node, 4, "reduce"))
        case aten.scatter.reduce | aten.scatter.value_reduce:
            return {"add": "sum"}.get(str(node.kwargs["reduce"]), "prod")
    return None


def index_write(node: fx.Node) -> Rule:
    """`index_add`, `index_copy` and `index_fill`: an index of one dimension."""
    shape, index, *source = (shape_of(operand) for operand in operands(node))
    dim = argument(node, 1, "dim") % max(1, len(shape))
    self_dims, index_dims = factor_dims(shape), factor_dims(index, "i")
    source_dims: list[Dims] = [unsplit(source_shape) for source_shape in source]
    if source and len(source[0]) == len(shape) and index:
        source_dims = [tuple(index_dims[0] if number == dim else factors for number, factors in enumerate(self_dims))]
    adds = node.target is aten.index_add.default and not _is_bool(node)
    copies = node.target is aten.index_copy.default and not _is_bool(node)
    return Rule(
        operands=(self_dims, index_dims, *source_dims),
        results=(self_dims,),
        sizes=sizes_of((self_dims, shape), (index_dims, index)),
        combine={"i0": "sum"} if adds else {},
        linear=_linear_in(0, 2) if adds or copies else (),
        added=frozenset({0, 2}) if adds or copies else frozenset(),
        indices=frozenset({1}),
        lower=_lower_scatter(node, dim, self_dims),
    )


def index_put(node: fx.Node) -> Rule:
    indexing = AdvancedIndexing(node)
    if indexing.are_masks:
        return _masked_put(node, indexing)
    values = shape_of(operands(node)[-1])
    values_dims = broadcast(indexing.result_dims, indexing.result_shape, values)
    accumulates = bool(argument(node, 3, "accumulate", False))
    last = len(operands(node)) - 1
    index_factors = [factor for factors in indexing.shared_dims for factor in factors]
    # Values that are broadcast along the index would be written at the positions of padding, too.
    can_add = accumulates and not _is_bool(node)
    shares = {factor for factor in index_factors if can_add and (factor,) in values_dims}

    def lower(local: LocalCall) -> fx.Node:
        if not (spans := indexing.spans(local)):
            return local.default()
        indices = indexing.local_indices(local)
        return local.call(positions.index_put, node.target, local.parts[0], indices, local.parts[-1],
                          accumulates, spans)  # fmt: skip

    return Rule(
        operands=(indexing.table_dims, *indexing.indices_dims, values_dims),
        results=(indexing.table_dims,),
        sizes=indexing.sizes,
        combine=dict.fromkeys(shares, "sum"),
        linear=_linear_in(0, last) if not _is_bool(node) else (),
        added=frozenset({0, last}),
        indices=frozenset(range(1, last)),
        lower=lower,
    )


def _masked_put(node: fx.Node, indexing: AdvancedIndexing) -> Rule:
    """The tensor is split if a single mask selects the positions of one value; in other forms nothing is split."""
    inputs, self_dims = operands(node), factor_dims(indexing.shape)
    masks = [index for index in indexing.indices if index is not None]
    begin = next(position for position, index in enumerate(indexing.indices) if index is not None)
    size = shape_of(masks[0])
    values = shape_of(inputs[-1])
    if len(masks) > 1 or math.prod(values) > 1 or indexing.shape[begin : begin + len(size)] != size:
        return Rule(tuple(unsplit(shape_of(operand)) for operand in inputs), (unsplit(indexing.shape),), {})
    mask_dims = self_dims[begin : begin + len(size)]
    return Rule((self_dims, mask_dims, unsplit(values)), (self_dims,), sizes_of((self_dims, indexing.shape)))


def put(node: fx.Node) -> Rule:
    """`put`: positions are those of the flattened tensor, which is not split."""
    shape, index, _ = (shape_of(operand) for operand in operands(node))
    adds = bool(argument(node, 3, "accumulate", False)) and not _is_bool(node)
    index_dims = factor_dims(index, "i")
    return Rule(
        operands=(unsplit(shape), index_dims, index_dims),
        results=(unsplit(shape),),
        sizes=sizes_of((index_dims, index)),
        combine={factor: "sum" for factors in index_dims for factor in factors} if adds else {},
        linear=_linear_in(0, 2) if not _is_bool(node) else (),
        added=frozenset({0, 2}),
        indices=frozenset({1}),
    )


def embedding_backward(node: fx.Node) -> Rule:
    gradient, index = (shape_of(operand) for operand in operands(node))
    num_rows, padding_row, by_frequency = node.args[2:5]
    index_dims = factor_dims(index, "i")
    table_dims = factor_dims((num_rows, gradient[-1]), "t")  # type: ignore[arg-type]

    def lower(local: LocalCall) -> fx.Node:
        if not (span := span_of(local, table_dims[0])):
            return local.default()
        return local.call(positions.embedding_gradient, *local.parts, span, local.size(table_dims[0][0]),
                          padding_row, by_frequency)  # fmt: skip

    return Rule(
        operands=((*index_dims, table_dims[1]), index_dims),
        results=(table_dims,),
        sizes=sizes_of((index_dims, index), (table_dims, (num_rows, gradient[-1]))),  # type: ignore[arg-type]
        combine={} if by_frequency else {factor: "sum" for factors in index_dims for factor in factors},
        linear=(frozenset({0}),),
        indices=frozenset({1}),
        lower=lower,
    )


RULES = {
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter.reduce: scatter,
    aten.scatter.value_reduce: scatter,
    aten.scatter_add.default: scatter,
    aten.scatter_reduce.two: scatter,
    aten.index_add.default: index_write,
    aten.index_copy.default: index_write,
    aten.index_fill.int_Scalar: index_write,
    aten.index_fill.int_Tensor: index_write,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.put.default: put,
    aten.embedding_dense_backward.default: embedding_backward,
}
