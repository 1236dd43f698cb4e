"""Decompositions into slices, which show what moves between ranks: splits become slices rather than views of memory,
the gradient of a slice becomes padding (through which partial sums pass), stacks are along a dimension of their own,
and reflections become reversed slices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _split(x: Tensor, length: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    begins = range(0, size, length) if size else [0]
    return [aten.slice.Tensor(x, dim, begin, min(begin + length, size)) for begin in begins]


def _split_with_sizes(x: Tensor, lengths: Sequence[int], dim: int = 0) -> list[Tensor]:
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    return [aten.slice.Tensor(x, dim, begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]


def _slice_backward(gradient: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    span = range(shape[dim])[start:end:step]
    if step == 1:
        back = shape[dim] - span.start - len(span)
        pads = [0, 0] * (len(shape) - 1 - dim % len(shape)) + [span.start, back]
        return aten.constant_pad_nd.default(gradient, pads)
    zeros = gradient.new_zeros(shape)
    return aten.slice_scatter.default(zeros, gradient, dim, start, end, step)


def _ends(shape: Sequence[int], pads: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dimension, positions before, positions after) of padded dimensions."""
    for index in range(0, len(pads), 2):
        if pads[index] or pads[index + 1]:
            yield len(shape) - 1 - index // 2, pads[index], pads[index + 1]


def _reflection_pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    if min(pads) < 0:
        return NotImplemented
    for dim, front, back in _ends(x.shape, pads):
        size = x.shape[dim]
        before = aten.slice.Tensor(x, dim, 1, front + 1).flip(dim)
        after = aten.slice.Tensor(x, dim, size - 1 - back, size - 1).flip(dim)
        x = torch.cat([before, x, after], dim)
    return x


def _reflection_pad_backward(gradient: Tensor, x: Tensor, pads: Sequence[int]) -> Tensor:
    if min(pads) < 0:
        return NotImplemented
    for dim, front, back in _ends(x.shape, pads):
        size, later_pads = x.shape[dim], [0, 0] * (x.dim() - 1 - dim)
        before = aten.slice.Tensor(gradient, dim, 0, front).flip(dim)
        after = aten.slice.Tensor(gradient, dim, front + size, front + size + back).flip(dim)
        gradient = (
            aten.slice.Tensor(gradient, dim, front, front + size)
            + aten.constant_pad_nd.default(before, [*later_pads, 1, size - 1 - front])
            + aten.constant_pad_nd.default(after, [*later_pads, size - 1 - back, 1])
        )
    return gradient


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenation along a new dimension. Torch concatenates along the first dimension and views the result, which
    merges the two dimensions: a batch that is split there could not stay split."""
    return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _new_empty_strided(x: Tensor, shape: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    return x.new_empty(shape, **options)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.slice_backward.default: _slice_backward,
    aten.stack.default: _stack,
    aten.reflection_pad1d.default: _reflection_pad,
    aten.reflection_pad2d.default: _reflection_pad,
    aten.reflection_pad3d.default: _reflection_pad,
    aten.reflection_pad1d_backward.default: _reflection_pad_backward,
    aten.reflection_pad2d_backward.default: _reflection_pad_backward,
    aten.reflection_pad3d_backward.default: _reflection_pad_backward,
    aten.new_empty_strided.default: _new_empty_strided,
}
