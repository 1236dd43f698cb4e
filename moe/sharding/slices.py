"""Slices written so that what moves between ranks is seen: splits as slices rather than views of memory, and the
gradient of a slice as padding, through which partial sums pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _split(x: Tensor, length: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    begins = range(0, size, length) if size else [0]
    return [aten.slice.Tensor(x, dim, begin, min(begin + length, size)) for begin in begins]


def _split_with_sizes(x: Tensor, lengths: Sequence[int], dim: int = 0) -> list[Tensor]:
    begins = [sum(lengths[:at]) for at in range(len(lengths))]
    return [
        aten.slice.Tensor(x, dim, begin, begin + length)
        for begin, length in zip(begins, lengths, strict=True)
    ]


def _slice_backward(
    gradient: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    span = range(shape[dim])[start:end:step]
    if step == 1:
        behind = shape[dim] - span.start - len(span)
        pads = [0, 0] * (len(shape) - 1 - dim % len(shape)) + [span.start, behind]
        return aten.constant_pad_nd.default(gradient, pads)
    zeros = gradient.new_zeros(shape)
    return aten.slice_scatter.default(zeros, gradient, dim, start, end, step)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.slice_backward.default: _slice_backward,
}
