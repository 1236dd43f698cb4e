"""Convolutions: batch, channels and groups are factors. Along spatial dimensions, each rank fetches the halo that the
windows of its part read (GShard, arXiv 2006.16668, section 3.3)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from moe.sharding.decompositions.window_operators import CONVOLUTION_WEIGHT, expand_to_dims
from moe.sharding.exchange import halo, windows
from moe.sharding.exchange.windows import Geometry
from moe.sharding.operands import operands, shape_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Dims, Exchange, Factor, Rule

aten = torch.ops.aten


def _channels(name: Factor, size: int, groups: int) -> tuple[Factor, ...]:
    """Factors of a dimension of channels, with the groups as the major factor."""
    return (("g",) if groups > 1 else ()) + ((name,) if size // groups > 1 else ())


def _spatial(geometries: Sequence[Geometry], operand_sizes: Sequence[int], result_sizes: Sequence[int]) -> Dims:
    """Factors of spatial dimensions; only dimensions whose windows read one position have one."""
    return tuple(
        (f"s{index}",) if geometry.is_pointwise and size == length > 1 else ()
        for index, (geometry, size, length) in enumerate(zip(geometries, operand_sizes, result_sizes, strict=True))
    )


def _sizes(*tensors: tuple[Dims, Sequence[int]], groups: int) -> dict[Factor, int]:
    sizes = {}
    for dims, shape in tensors:
        for factors, size in zip(dims, shape, strict=True):
            for factor in factors:
                sizes[factor] = groups if factor == "g" else size // (groups if "g" in factors else 1)
    return sizes


def _flops(geometries: Sequence[Geometry], spatial: Dims, num_windows: Sequence[int]) -> float:
    """Operations for each combination of factors: those of the kernel, and of spatial dimensions without a factor."""
    counts = (1 if factors else count for factors, count in zip(spatial, num_windows, strict=True))
    return 2.0 * math.prod(geometry.kernel for geometry in geometries) * math.prod(counts)


def _groups(local: LocalCall, groups: int) -> int:
    return local.size("g") if groups > 1 else 1


def convolution(node: fx.Node) -> Rule:
    x, weight = (shape_of(operand) for operand in operands(node)[:2])
    result = tuple(node.meta["val"].shape)
    args: Sequence[Any] = node.args
    is_transposed, output_padding, groups = args[6:9]
    num_dims = len(x) - 2
    stride, padding, dilation = (expand_to_dims(argument, num_dims) for argument in args[3:6])
    geometries = [Geometry(*dim_arguments) for dim_arguments in zip(weight[2:], stride, padding, dilation, strict=True)]
    spatial = _spatial(geometries, x[2:], result[2:])
    x_channels, result_channels = _channels("i", x[1], groups), _channels("o", result[1], groups)
    batch = ("n",) if x[0] > 1 else ()
    # groups are in the first dimension of the weights: the result's channels, unless the convolution is transposed
    channels = (
        (x_channels, tuple(set(result_channels) - {"g"}))
        if is_transposed
        else (result_channels, tuple(set(x_channels) - {"g"}))
    )
    dims: list[Dims] = [(batch, x_channels, *spatial), (*channels, *[()] * num_dims)]
    if len(operands(node)) == 3:
        dims.append((result_channels,))
    result_dims: Dims = (batch, result_channels, *spatial)

    def arguments(local: LocalCall, spatial_dim: int | None = None) -> tuple[Any, ...]:
        def zero_dim(values: Any) -> list[int]:
            return [
                0 if index == spatial_dim else value for index, value in enumerate(expand_to_dims(values, num_dims))
            ]

        return (stride, zero_dim(padding), dilation, is_transposed, zero_dim(output_padding), _groups(local, groups))

    def lower(local: LocalCall) -> fx.Node:
        bias = local.parts[2] if len(local.parts) == 3 else None
        return local.call(aten.convolution.default, *local.parts[:2], bias, *arguments(local))

    def exchange_along(spatial_dim: int) -> Exchange:
        dim, geometry = spatial_dim + 2, geometries[spatial_dim]

        def window(count: int) -> halo.Window:
            return geometry.looking_at(count, x[dim]) if is_transposed else geometry.read_by(count, x[dim])

        def moved_bytes(degree: int) -> float:
            itemsize = node.meta["val"].dtype.itemsize
            return halo.moved_bytes(x, dim, itemsize, window(-(-result[dim] // degree)), degree)

        def exchange(local: LocalCall, axis: int) -> fx.Node:
            part_window, args = window(local.part_shape()[dim]), arguments(local, spatial_dim)
            rows = local.runtime(halo.fetch, [local.parts[0]], axis, dim, [part_window])
            bias = local.parts[2] if len(local.parts) == 3 else None
            if not is_transposed:
                return local.call(aten.convolution.default, rows, local.parts[1], bias, *args)
            spread = local.call(aten.convolution.default, rows, local.parts[1], None, *args)
            output = local.runtime(windows.take_local_positions, spread, axis, dim, part_window, geometry)
            if bias is None:
                return output
            column = local.call(aten.reshape.default, bias, [-1, *[1] * num_dims])
            return local.call(aten.add.Tensor, output, column)

        other_operands = (None,) * (len(dims) - 1)
        return Exchange(f"halo d{dim}", (dim, *other_operands), (dim,), moved_bytes, exchange)

    return Rule(
        tuple(dims),
        (result_dims,),
        _sizes((dims[0], x), (result_dims, result), groups=groups),
        combine={"i": "sum"},
        linear=(frozenset({0}), frozenset({1})),
        added=frozenset({2}) if len(dims) == 3 else frozenset(),
        work="product",
        flops=_flops(geometries, spatial, x[2:] if is_transposed else result[2:]),
        exchanges=tuple(
            exchange_along(spatial_dim)
            for spatial_dim, factors in enumerate(spatial)
            if not factors and x[spatial_dim + 2] > 1 and result[spatial_dim + 2] > 1
        ),
        lower=lower,
    )


def convolution_weight(node: fx.Node) -> Rule:
    """Rule of the weights' gradient. If spatial dimensions are split, each rank's windows give partial sums."""
    gradient, x = (shape_of(operand) for operand in operands(node))
    args: Sequence[Any] = node.args
    kernel, stride, padding, dilation, groups = args[2:]
    geometries = [Geometry(*dim_arguments) for dim_arguments in zip(kernel, stride, padding, dilation, strict=True)]
    spatial = _spatial(geometries, x[2:], gradient[2:])
    gradient_channels = _channels("o", gradient[1], groups)
    x_channels = _channels("i", x[1], groups)
    batch = ("n",) if x[0] > 1 else ()
    dims: tuple[Dims, Dims] = ((batch, gradient_channels, *spatial), (batch, x_channels, *spatial))
    result_dims: Dims = (gradient_channels, tuple(set(x_channels) - {"g"}), *[()] * len(geometries))

    def lower(local: LocalCall, spatial_dim: int | None = None, rows: fx.Node | None = None) -> fx.Node:
        pads = [0 if index == spatial_dim else value for index, value in enumerate(padding)]
        pair = local.parts if rows is None else (local.parts[0], rows)
        return local.call(
            windows.convolution_weight, *pair, kernel, stride, pads, dilation, _groups(local, groups)
        )  # fmt: skip

    def exchange_along(spatial_dim: int) -> Exchange:
        dim, geometry = spatial_dim + 2, geometries[spatial_dim]

        def moved_bytes(degree: int) -> float:
            window = geometry.read_by(-(-gradient[dim] // degree), x[dim])
            return halo.moved_bytes(x, dim, node.meta["val"].dtype.itemsize, window, degree)

        def exchange(local: LocalCall, axis: int) -> fx.Node:
            window = geometry.read_by(local.operand_part_shape(0)[dim], x[dim])
            if gradient[dim] % local.degrees[axis]:
                local.parts[0] = local.mask_padding(local.parts[0], dim, gradient[dim], [axis], 0)
            return lower(local, spatial_dim, local.runtime(halo.fetch, [local.parts[1]], axis, dim, [window]))

        return Exchange(f"halo d{dim}", (dim, dim), (None,), moved_bytes, exchange, combine="sum")

    return Rule(
        dims,
        (result_dims,),
        _sizes((dims[0], gradient), (dims[1], x), groups=groups),
        combine=dict.fromkeys(["n", *(factor for factors in spatial for factor in factors)], "sum"),
        linear=(frozenset({0}), frozenset({1})),
        work="product",
        flops=_flops(geometries, spatial, gradient[2:]),
        exchanges=tuple(
            exchange_along(spatial_dim)
            for spatial_dim, factors in enumerate(spatial)
            if not factors and x[spatial_dim + 2] > 1 and gradient[spatial_dim + 2] > 1
        ),
        lower=lower,
    )


RULES = {aten.convolution.default: convolution, CONVOLUTION_WEIGHT: convolution_weight}
