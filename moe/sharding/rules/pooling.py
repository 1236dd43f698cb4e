"""Pooling: along spatial dimensions, each rank fetches the halo that the windows of its part read."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from moe.sharding.decompositions.window_operators import AVG_POOL_GRADIENT, MAX_POOL_GRADIENT, expand_to_dims
from moe.sharding.exchange import halo, windows
from moe.sharding.exchange.halo import Window
from moe.sharding.exchange.windows import Geometry
from moe.sharding.operands import argument, operands, results, shape_of
from moe.sharding.rules.dims import factor_dims, sizes_of
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.rule import Exchange, Lower, Rule

aten = torch.ops.aten


def _rule(
    node: fx.Node, size: Sequence[int], exchange: Callable[[int], Exchange], lower: Lower | None = None, **facts: Any
) -> Rule:
    """Rule of pooling. Dimensions before the spatial ones (of sizes `size`) are factors."""
    shape = shape_of(operands(node)[0])
    lead = len(shape) - len(size)
    dims = factor_dims(shape, but=frozenset(range(lead, len(shape))))
    result = tuple(results(node)[0].shape)
    return Rule(
        (dims,) * len(operands(node)),
        (dims,) * len(results(node)),
        sizes_of((dims, shape)),
        exchanges=tuple(exchange(dim) for dim in range(lead, len(shape)) if shape[dim] > 1 and result[dim] > 1),
        lower=lower,
        **facts,
    )


def _halo(
    node: fx.Node, dim: int, window: Callable[[int], Window], lower: Callable[[LocalCall, int, Window], fx.Node]
) -> Exchange:
    """Exchange along one dimension. `window(length of a rank's part of the result)` is the window of each operand."""
    inputs, size = operands(node), results(node)[0].shape[dim]

    def moved_bytes(degree: int) -> float:
        part_window = window(-(-size // degree))
        return sum(
            halo.moved_bytes(shape_of(operand), dim, operand.meta["val"].dtype.itemsize, part_window, degree)
            for operand in inputs
        )

    return Exchange(
        f"halo d{dim}",
        (dim,) * len(inputs),
        (dim,) * len(results(node)),
        moved_bytes,
        lambda local, axis: lower(local, axis, window(local.part_shape()[dim])),
    )


def _replace(values: Sequence[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


def max_pool(node: fx.Node) -> Rule:
    x, dtype = shape_of(operands(node)[0]), results(node)[0].dtype
    num_dims = 2 if node.target is aten.max_pool2d_with_indices.default else 3
    kernel = expand_to_dims(argument(node, 1, "kernel_size"), num_dims)
    stride = expand_to_dims(argument(node, 2, "stride"), num_dims, kernel)
    padding = expand_to_dims(argument(node, 3, "padding", 0), num_dims)
    dilation = expand_to_dims(argument(node, 4, "dilation", 1), num_dims)
    ceil_mode, lead = argument(node, 5, "ceil_mode", False), len(x) - num_dims
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min

    def exchange(dim: int) -> Exchange:
        spatial_dim = dim - lead
        geometry = Geometry(kernel[spatial_dim], stride[spatial_dim], padding[spatial_dim], dilation[spatial_dim])

        def lower(local: LocalCall, axis: int, window: Window) -> fx.Node:
            rows = local.runtime(halo.fetch, local.parts, axis, dim, [window], lowest)
            return local.runtime(windows.max_pool_part, rows, axis, dim, window, x[dim], kernel, stride,
                                 _replace(padding, spatial_dim, 0), dilation, ceil_mode)  # fmt: skip

        return _halo(node, dim, lambda count: geometry.read_by(count, x[dim]), lower)

    return _rule(node, x[lead:], exchange)


def max_pool_gradient(node: fx.Node) -> Rule:
    gradient = shape_of(operands(node)[0])
    args: Sequence[Any] = node.args
    size, kernel, stride, padding, dilation = args[2:7]
    lead = len(gradient) - len(size)

    def default(local: LocalCall) -> fx.Node:
        return local.default(windows.max_pool_gradient)

    def exchange(dim: int) -> Exchange:
        geometry = Geometry(*(values[dim - lead] for values in (kernel, stride, padding, dilation)))

        def lower(local: LocalCall, axis: int, window: Window) -> fx.Node:
            return local.runtime(windows.max_pool_gradient_part, *local.parts, axis, dim, window, size)

        return _halo(node, dim, lambda count: geometry.looking_at(count, gradient[dim]), lower)

    return _rule(node, size, exchange, default, linear=(frozenset({0}),), indices=frozenset({1}))


def avg_pool(node: fx.Node) -> Rule:
    x = shape_of(operands(node)[0])
    num_dims = 2 if node.target is aten.avg_pool2d.default else 3
    kernel = expand_to_dims(argument(node, 1, "kernel_size"), num_dims)
    stride = expand_to_dims(argument(node, 2, "stride"), num_dims, kernel)
    padding = expand_to_dims(argument(node, 3, "padding", 0), num_dims)
    ceil_mode = argument(node, 4, "ceil_mode", False)
    with_padding = argument(node, 5, "count_include_pad", True)
    divisor, lead = argument(node, 6, "divisor_override"), len(x) - num_dims
    geometries = [Geometry(*dim_arguments, 1) for dim_arguments in zip(kernel, stride, padding, strict=True)]

    def exchange(dim: int) -> Exchange:
        spatial_dim = dim - lead

        def lower(local: LocalCall, axis: int, window: Window) -> fx.Node:
            rows = local.runtime(halo.fetch, local.parts, axis, dim, [window])
            sums = local.call(
                windows.avg_pool, rows, kernel, stride, _replace(padding, spatial_dim, 0), ceil_mode, True, 1
            )
            count = local.part_shape()[dim]
            begins = Window(0, count, count, count)
            return local.runtime(windows.divide_window_sums, sums, axis, dim, begins, geometries, list(x[lead:]),
                                 with_padding, divisor)  # fmt: skip

        return _halo(node, dim, lambda count: geometries[spatial_dim].read_by(count, x[dim]), lower)

    return _rule(node, x[lead:], exchange, linear=(frozenset({0}),))


def avg_pool_gradient(node: fx.Node) -> Rule:
    gradient = shape_of(operands(node)[0])
    args: Sequence[Any] = node.args
    size, kernel, stride, padding, ceil_mode, with_padding, divisor = args[1:8]
    lead = len(gradient) - len(size)
    geometries = [Geometry(*dim_arguments, 1) for dim_arguments in zip(kernel, stride, padding, strict=True)]

    def default(local: LocalCall) -> fx.Node:
        return local.default(windows.avg_pool_gradient)

    def exchange(dim: int) -> Exchange:
        spatial_dim = dim - lead
        geometry = geometries[spatial_dim]

        def lower(local: LocalCall, axis: int, window: Window) -> fx.Node:
            rows = local.runtime(halo.fetch, local.parts, axis, dim, [window])
            rows = local.runtime(
                windows.divide_window_sums, rows, axis, dim, window, geometries, size, with_padding, divisor
            )
            padded_size = _replace(size, spatial_dim, geometry.spread(window.length))
            spread = local.call(windows.avg_pool_gradient, rows, padded_size, kernel, stride,
                                _replace(padding, spatial_dim, 0), ceil_mode, True, 1)  # fmt: skip
            return local.runtime(windows.take_local_positions, spread, axis, dim, window, geometry)

        return _halo(node, dim, lambda count: geometry.looking_at(count, gradient[dim]), lower)

    return _rule(node, size, exchange, default, linear=(frozenset({0}),))


RULES = {
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.avg_pool2d.default: avg_pool,
    aten.avg_pool3d.default: avg_pool,
    MAX_POOL_GRADIENT: max_pool_gradient,
    AVG_POOL_GRADIENT: avg_pool_gradient,
}
