"""Operators that need some dimensions whole, and treat each position of the others independently."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moe.sharding.operands import argument, operands, results, shape_of
from moe.sharding.rules.dims import factor_dims, sizes_of, unsplit
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Lower, Rule

aten = torch.ops.aten

WholeDims = Callable[[fx.Node], Any]
"""Dimension or dimensions of the first operand that an operator needs whole; None for all."""


def rowwise(whole_dims_of: WholeDims, linear: bool = False, lower: Lower | None = None) -> Callable[[fx.Node], Rule]:
    """Rule of an operator whose other operands and results have the dimensions of the first operand; whole dimensions
    may have another size there, or be missing."""

    def rule(node: fx.Node) -> Rule:
        shape = shape_of(operands(node)[0])
        raw_dims = whole_dims_of(node)
        dims = range(len(shape)) if raw_dims is None else [raw_dims] if isinstance(raw_dims, int) else raw_dims
        whole_dims = frozenset(dim % len(shape) for dim in dims) if shape else frozenset()
        first_dims = factor_dims(shape, but=whole_dims)

        def dims_of(tensor_shape: tuple[int, ...]) -> Dims:
            row_dims = [dim for dim in range(len(shape)) if dim not in whole_dims]
            tensor_dims = list(range(len(shape))) if len(tensor_shape) == len(shape) else row_dims
            if len(tensor_shape) != len(tensor_dims):
                return unsplit(tensor_shape)
            return tuple(
                first_dims[dim] if size == shape[dim] else ()
                for dim, size in zip(tensor_dims, tensor_shape, strict=True)
            )

        outputs = results(node)
        return Rule(
            operands=tuple(dims_of(shape_of(operand)) for operand in operands(node)),
            results=tuple(dims_of(tuple(output.shape)) if output is not None else () for output in outputs),
            sizes=sizes_of((first_dims, shape)),
            linear=(frozenset({0}),) if linear and _keeps_dtype(node) else (),
            lower=lower,
        )

    return rule


def _keeps_dtype(node: fx.Node) -> bool:
    outputs = [output for output in results(node) if output is not None]
    dtype = operands(node)[0].meta["val"].dtype
    return all(output.dtype == dtype or output.dtype.is_complex for output in outputs) and dtype != torch.bool


def leading(
    count: Callable[[int], int],
    linear: bool = False,
    pivots: int | None = None,
    lower: Callable[[LocalCall], fx.Node] = LocalCall.call_in_captured_order,
) -> Callable[[fx.Node], Rule]:
    """Rule of an operator on a batch: the first dimensions of all operands and results are the batch's, and their
    number is a function of the number of the first operand's dimensions. Gradients of factorizations depend on the
    memory order of the matrix. The operator also checks padding of an operand of `pivots`, which count from 1."""

    def rule(node: fx.Node) -> Rule:
        shape = shape_of(operands(node)[0])
        number = max(0, count(len(shape)))
        batch = factor_dims(shape[:number])

        def dims_of(tensor_shape: tuple[int, ...]) -> Dims:
            if tensor_shape[:number] != shape[:number]:
                return unsplit(tensor_shape)
            return (*batch, *unsplit(tensor_shape[number:]))

        return Rule(
            operands=tuple(dims_of(shape_of(operand)) for operand in operands(node)),
            results=tuple(dims_of(tuple(result.shape)) if result is not None else () for result in results(node)),
            sizes=sizes_of((batch, shape[:number])),
            linear=(frozenset({0}),) if linear and _keeps_dtype(node) else (),
            indices=frozenset() if pivots is None else frozenset({pivots}),
            identity={} if pivots is None else {pivots: 1},
            lower=lower,
        )

    return rule


def argument_dims(number: int, name: str = "dim", default: Any = None) -> WholeDims:
    """The dimensions that an argument names."""
    return lambda node: argument(node, number, name, default)


def _all_but(number: int, name: str, default: int) -> WholeDims:
    def other_dims(node: fx.Node) -> list[int]:
        num_dims = len(shape_of(operands(node)[0]))
        return [dim for dim in range(num_dims) if dim != argument(node, number, name, default) % num_dims]

    return other_dims


def search_sorted(node: fx.Node) -> Rule:
    """Rule of `searchsorted` and `bucketize`: values are independent if all are searched in the same sequence."""
    (name, *_) = node.target._schema.name.removeprefix("aten::").split(".")  # type: ignore[union-attr]
    inputs = operands(node)
    sequence, values = (inputs[0], inputs[1]) if name == "searchsorted" else (inputs[1], inputs[0])
    shape, num_shared = shape_of(values), len(shape_of(sequence)) - 1
    dims = factor_dims(shape, but=frozenset({len(shape) - 1}) if num_shared else frozenset())
    sequence_dims = (*dims[:num_shared], ())
    operand_dims = tuple(sequence_dims if operand is not values else dims for operand in inputs)
    return Rule(operand_dims, (dims,), sizes_of((dims, shape)))


def value_check(node: fx.Node) -> Rule:
    """Rule of a check of a value, which runs on every rank."""
    return Rule(tuple(unsplit(shape_of(operand)) for operand in operands(node)), ((),), {})


_FAMILIES: tuple[tuple[Callable[[fx.Node], Rule], tuple[Any, ...]], ...] = (
    (rowwise(argument_dims(1)), (
        aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default, aten.cumprod.default,
        aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, aten.argmax.default,
        aten.argmin.default, aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.prod.dim_int,
    )),
    (rowwise(argument_dims(2), linear=True), (
        aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.glu_backward.default,
    )),
    (rowwise(argument_dims(1), linear=True), (
        aten.cumsum.default, aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default,
    )),
    (rowwise(argument_dims(1, default=-1)), (
        aten.sort.default, aten.argsort.default, aten.mode.default, aten.glu.default,
    )),
    # this overload takes `dim` by name alone
    (rowwise(argument_dims(9, default=-1)), (aten.sort.stable,)),
    (rowwise(argument_dims(2, default=-1)), (aten.topk.default, aten.kthvalue.default)),
    (rowwise(lambda node: None), (
        aten.median.default, aten.nanmedian.default, aten.prod.default, aten.trace.default,
    )),
    (rowwise(_all_but(2, "dim", 0)), (aten.renorm.default,)),
    (rowwise(_all_but(2, "dim", 0), lower=LocalCall.contiguous), (aten._weight_norm_interface.default,)),
    (rowwise(_all_but(4, "dim", 0), lower=LocalCall.contiguous), (
        aten._weight_norm_interface_backward.default,
    )),
    (leading(lambda num_dims: num_dims - 2), (
        aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default, aten._linalg_det.default,
        aten._linalg_slogdet.default, aten._linalg_solve_ex.default, aten._linalg_eigh.default,
        aten.linalg_qr.default, aten._linalg_svd.default, aten.linalg_solve_triangular.default,
        aten.triangular_solve.default, aten.cholesky_solve.default, aten.linalg_lu_factor_ex.default,
        aten.linalg_matrix_exp.default, aten._cdist_forward.default, aten._cdist_backward.default,
    )),
    (leading(lambda num_dims: num_dims - 2, pivots=1), (aten.linalg_lu_solve.default,)),
    (leading(lambda num_dims: num_dims, linear=True), (aten.view_as_real.default,)),
    (leading(lambda num_dims: num_dims - 1, linear=True, lower=LocalCall.contiguous), (
        aten.view_as_complex.default,
    )),
    (search_sorted, (aten.searchsorted.Tensor, aten.bucketize.Tensor)),
    (value_check, (aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default)),
)  # fmt: skip
"""Rules, each with the operators that have it."""
RULES = {target: maker for maker, targets in _FAMILIES for target in targets}
