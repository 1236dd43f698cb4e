"""Gradients of convolutions and pooling as separate operators, each with only the operands that it reads.

Torch's operators also take operands of which only the shape is used, and return several gradients at once, whose best
placements differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe.sharding.exchange import windows

aten = torch.ops.aten


_convolution_weight = torch.library.custom_op(
    "shardyard::convolution_weight",
    windows.convolution_weight,
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "SymInt groups) -> Tensor",
)
_max_pool_gradient = torch.library.custom_op(
    "shardyard::max_pool_gradient",
    windows.max_pool_gradient,
    mutates_args=(),
    schema="(Tensor gradient, Tensor places, SymInt[] size, SymInt[] kernel, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool ceil_mode) -> Tensor",
)
_avg_pool_gradient = torch.library.custom_op(
    "shardyard::avg_pool_gradient",
    windows.avg_pool_gradient,
    mutates_args=(),
    schema="(Tensor gradient, SymInt[] size, SymInt[] kernel, SymInt[] stride, SymInt[] padding, bool ceil_mode, "
    "bool with_padding, SymInt? divisor) -> Tensor",
)


@_convolution_weight.register_fake
def _(gradient: Tensor, x: Tensor, kernel: Sequence[int], *options: Any) -> Tensor:
    return x.new_empty(gradient.shape[1], x.shape[1] // options[-1], *kernel)


@_max_pool_gradient.register_fake
def _(gradient: Tensor, places: Tensor, size: Sequence[int], *options: Any) -> Tensor:
    return gradient.new_empty(*gradient.shape[: -len(size)], *size)


@_avg_pool_gradient.register_fake
def _(gradient: Tensor, size: Sequence[int], *options: Any) -> Tensor:
    return gradient.new_empty(*gradient.shape[: -len(size)], *size)


CONVOLUTION_WEIGHT = torch.ops.shardyard.convolution_weight.default
MAX_POOL_GRADIENT = torch.ops.shardyard.max_pool_gradient.default
AVG_POOL_GRADIENT = torch.ops.shardyard.avg_pool_gradient.default


def expand_to_dims(argument: Sequence[int] | int | None, num_dims: int, default: Sequence[int] = ()) -> list[int]:
    """One number for each spatial dimension. Torch also accepts one number for all, or none for the default."""
    values = [argument] if isinstance(argument, int) else list(argument or ()) or list(default)
    return values * num_dims if len(values) == 1 else values


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    kernel = list(weight.shape[2:])
    num_dims = len(kernel)
    stride, padding, dilation = (expand_to_dims(value, num_dims) for value in (stride, padding, dilation))
    x_gradient = weight_gradient = bias_gradient = None
    # the smaller one has a position for each window over the larger one, which may have spare rows at the end
    smaller, larger = (x, gradient) if transposed else (gradient, x)
    spare = [
        larger.shape[2 + index] + 2 * padding[index] - dilation[index] * (kernel[index] - 1) - 1
        - (smaller.shape[2 + index] - 1) * stride[index]
        for index in range(num_dims)
    ]  # fmt: skip
    lacking = [count // length for count, length in zip(spare, stride, strict=True)] if transposed else []
    if output_mask[0]:
        end_padding = [0] * num_dims if transposed else spare
        x_gradient = aten.convolution.default(
            gradient, weight, None, stride, padding, dilation, not transposed, end_padding, groups
        )
        for index, count in enumerate(lacking):
            if count:
                x_gradient = aten.slice.Tensor(x_gradient, 2 + index, 0, x.shape[2 + index])
    if output_mask[1]:
        if any(lacking):
            smaller = aten.constant_pad_nd.default(smaller, [pad for count in lacking[::-1] for pad in (0, count)])
        weight_gradient = CONVOLUTION_WEIGHT(smaller, larger, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        bias_gradient = gradient.sum([0, *range(2, 2 + num_dims)])
    return x_gradient, weight_gradient, bias_gradient


def _max_pool_backward(num_dims: int) -> Callable[..., Tensor]:
    def backward(
        gradient: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        places: Tensor,
    ) -> Tensor:
        size = list(x.shape[-num_dims:])
        kernel = expand_to_dims(kernel, num_dims)
        geometry = (
            expand_to_dims(stride, num_dims, kernel),
            expand_to_dims(padding, num_dims),
            expand_to_dims(dilation, num_dims),
        )
        return MAX_POOL_GRADIENT(gradient, places, size, kernel, *geometry, ceil_mode)

    return backward


def _avg_pool_backward(num_dims: int) -> Callable[..., Tensor]:
    def backward(
        gradient: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        with_padding: bool,
        divisor: int | None,
    ) -> Tensor:
        size = list(x.shape[-num_dims:])
        kernel = expand_to_dims(kernel, num_dims)
        return AVG_POOL_GRADIENT(
            gradient, size, kernel, expand_to_dims(stride, num_dims, kernel), expand_to_dims(padding, num_dims),
            ceil_mode, with_padding, divisor,
        )  # fmt: skip

    return backward


def _parts_of_averages(x: Tensor, input_size: int, output_size: int) -> Tensor:
    """`[output_size, input_size]`: the share of each position in each average of an adaptive pooling."""
    positions = torch.arange(input_size, device=x.device)
    averages = torch.arange(output_size, device=x.device).unsqueeze(1)
    begin = (averages * input_size).div(output_size, rounding_mode="floor")
    end = ((averages + 1) * input_size + (output_size - 1)).div(output_size, rounding_mode="floor")
    looked_at = (positions >= begin) & (positions < end)
    return looked_at.to(x.dtype) / (end - begin).to(x.dtype)


def _adaptive_avg_pool(x: Tensor, size: Sequence[int]) -> Tensor:
    lead, input_sizes = list(x.shape[: -len(size)]), list(x.shape[-len(size) :])
    if all(input_size % output_size == 0 for input_size, output_size in zip(input_sizes, size, strict=True)):
        pairs = [
            factor
            for input_size, output_size in zip(input_sizes, size, strict=True)
            for factor in (output_size, input_size // output_size)
        ]
        return x.reshape(lead + pairs).mean([len(lead) + 1 + 2 * index for index in range(len(size))])
    for index, (input_size, output_size) in enumerate(zip(input_sizes, size, strict=True)):
        shares = _parts_of_averages(x, input_size, output_size)
        x = (x.movedim(len(lead) + index, -1) @ shares.t()).movedim(-1, len(lead) + index)
    return x


def _adaptive_avg_pool_backward(num_dims: int) -> Callable[..., Tensor]:
    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        lead, input_sizes = list(x.shape[:-num_dims]), list(x.shape[-num_dims:])
        size = list(gradient.shape[-num_dims:])
        if all(input_size % output_size == 0 for input_size, output_size in zip(input_sizes, size, strict=True)):
            unit_pairs = [factor for output_size in size for factor in (output_size, 1)]
            pairs = [
                factor
                for input_size, output_size in zip(input_sizes, size, strict=True)
                for factor in (output_size, input_size // output_size)
            ]
            spread = gradient.reshape(lead + unit_pairs).expand(lead + pairs).reshape(lead + input_sizes)
            return spread / (torch.Size(input_sizes).numel() // torch.Size(size).numel())
        for index, (input_size, output_size) in enumerate(zip(input_sizes, size, strict=True)):
            shares = _parts_of_averages(gradient, input_size, output_size)
            gradient = (gradient.movedim(len(lead) + index, -1) @ shares).movedim(-1, len(lead) + index)
        return gradient

    return backward


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool,
    aten._adaptive_avg_pool3d.default: _adaptive_avg_pool,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
}
