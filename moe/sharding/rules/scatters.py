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


def _lower_scatter(node: fx.Node, dim: int, of_self: Dims) -> Any:
    """The local form of `operator(self, dim, index, ...)`."""

    def lower(local: LocalCall) -> fx.Node:
        if not of_self or not (span := span_of(local, of_self[dim])):
            return local.default()
        (part, _, index, *values), options = local.arguments()
        return local.call(positions.write, node.target, part, dim, index, span, *values, **options)

    return lower


def scatter(node: fx.Node) -> Rule:
    """All `scatter`s: the index has as many dimensions as what is written into, and as the source if there is one."""
    shape, index, *source = (shape_of(operand) for operand in operands(node))
    dim = argument(node, 1, "dim") % max(1, len(shape))
    tensors = (shape, index, *source)
    alike = {at for at in range(len(shape)) if at != dim and len({of[at] for of in tensors}) == 1}
    same_length = dim < len(shape) and all(of[dim] == index[dim] for of in source)

    def dims(of: tuple[int, ...], factor: str | None) -> Dims:
        return tuple(
            () if size < 2 else (factor,) if at == dim and factor else (f"d{at}",) if at in alike else ()
            for at, size in enumerate(of)
        )

    index_factor = "i" if same_length else None
    of_self, of_index = dims(shape, "t"), dims(index, index_factor)
    kind = _reduction(node)
    combine = _COMBINE.get(kind or "") if not _is_bool(node) else None
    if not argument(node, 5, "include_self", True):
        combine = None
    linear = _linear_in(0, 2) if source and (combine or kind is None) and not _is_bool(node) else ()
    return Rule(
        operands=(of_self, of_index, *(dims(source_shape, index_factor) for source_shape in source)),
        results=(of_self,),
        sizes=sizes_of((of_self, shape), (of_index, index)),
        combine={"i": combine} if combine and source else {},
        linear=linear,
        passes=frozenset({combine or "sum"}),
        added=frozenset({0, 2}) if source else frozenset(),
        indices=frozenset({1}),
        lower=_lower_scatter(node, dim, of_self),
    )


def _reduction(node: fx.Node) -> str | None:
    """How what is written is combined with what was there; None where it takes its place."""
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
    of_self, of_index = factor_dims(shape), factor_dims(index, "i")
    of_source: list[Dims] = [unsplit(source_shape) for source_shape in source]
    if source and len(source[0]) == len(shape) and index:
        of_source = [tuple(of_index[0] if at == dim else factors for at, factors in enumerate(of_self))]
    adds = node.target is aten.index_add.default and not _is_bool(node)
    copies = node.target is aten.index_copy.default and not _is_bool(node)
    return Rule(
        operands=(of_self, of_index, *of_source),
        results=(of_self,),
        sizes=sizes_of((of_self, shape), (of_index, index)),
        combine={"i0": "sum"} if adds else {},
        linear=_linear_in(0, 2) if adds or copies else (),
        added=frozenset({0, 2}) if adds or copies else frozenset(),
        indices=frozenset({1}),
        lower=_lower_scatter(node, dim, of_self),
    )


def index_put(node: fx.Node) -> Rule:
    indexing = AdvancedIndexing(node)
    if indexing.are_masks:
        return _masked_put(node, indexing)
    values = shape_of(operands(node)[-1])
    of_values = broadcast(indexing.of_result, indexing.result_shape, values)
    accumulates = bool(argument(node, 3, "accumulate", False))
    last = len(operands(node)) - 1
    index_factors = [factor for factors in indexing.of_shared for factor in factors]
    # Values that are broadcast along the index would be written at the positions of padding, too.
    can_add = accumulates and not _is_bool(node)
    shares = {factor for factor in index_factors if can_add and (factor,) in of_values}

    def lower(local: LocalCall) -> fx.Node:
        if not (spans := indexing.spans(local)):
            return local.default()
        indices = indexing.local_indices(local)
        return local.call(positions.index_put, node.target, local.parts[0], indices, local.parts[-1],
                          accumulates, spans)  # fmt: skip

    return Rule(
        operands=(indexing.of_table, *indexing.of_indices, of_values),
        results=(indexing.of_table,),
        sizes=indexing.sizes,
        combine=dict.fromkeys(shares, "sum"),
        linear=_linear_in(0, last) if not _is_bool(node) else (),
        added=frozenset({0, last}),
        indices=frozenset(range(1, last)),
        lower=lower,
    )


def _masked_put(node: fx.Node, indexing: AdvancedIndexing) -> Rule:
    """One value where a mask is true is written part by part; for other forms all is whole."""
    inputs, of_self = operands(node), factor_dims(indexing.shape)
    masks = [index for index in indexing.indices if index is not None]
    begin = next(at for at, index in enumerate(indexing.indices) if index is not None)
    size = shape_of(masks[0])
    values = shape_of(inputs[-1])
    if len(masks) > 1 or math.prod(values) > 1 or indexing.shape[begin : begin + len(size)] != size:
        return Rule(tuple(unsplit(shape_of(operand)) for operand in inputs), (unsplit(indexing.shape),), {})
    of_mask = of_self[begin : begin + len(size)]
    return Rule((of_self, of_mask, unsplit(values)), (of_self,), sizes_of((of_self, indexing.shape)))


def put(node: fx.Node) -> Rule:
    """Positions in a tensor as if it had one dimension: it is whole."""
    shape, index, _ = (shape_of(operand) for operand in operands(node))
    adds = bool(argument(node, 3, "accumulate", False)) and not _is_bool(node)
    of_index = factor_dims(index, "i")
    return Rule(
        operands=(unsplit(shape), of_index, of_index),
        results=(unsplit(shape),),
        sizes=sizes_of((of_index, index)),
        combine={factor: "sum" for factors in of_index for factor in factors} if adds else {},
        linear=_linear_in(0, 2) if not _is_bool(node) else (),
        added=frozenset({0, 2}),
        indices=frozenset({1}),
    )


def embedding_backward(node: fx.Node) -> Rule:
    gradient, index = (shape_of(operand) for operand in operands(node))
    num_rows, padding_row, by_frequency = node.args[2:5]
    of_index = factor_dims(index, "i")
    of_table = factor_dims((num_rows, gradient[-1]), "t")  # type: ignore[arg-type]

    def lower(local: LocalCall) -> fx.Node:
        if not (span := span_of(local, of_table[0])):
            return local.default()
        return local.call(positions.embedding_gradient, *local.parts, span, local.size(of_table[0][0]),
                          padding_row, by_frequency)  # fmt: skip

    return Rule(
        operands=((*of_index, of_table[1]), of_index),
        results=(of_table,),
        sizes=sizes_of((of_index, index), (of_table, (num_rows, gradient[-1]))),  # type: ignore[arg-type]
        combine={} if by_frequency else {factor: "sum" for factors in of_index for factor in factors},
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
