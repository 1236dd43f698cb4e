"""Convolutions and pooling on a rank's part, and their gradients, without operands whose shape alone is used."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.sharding.exchange import halo
from moe.sharding.exchange.halo import Window
from moe.sharding.exchange.mesh import Mesh

aten = torch.ops.aten


class Geometry(NamedTuple):
    """Windows along one dimension: window j reads the positions `j * stride - padding + k * dilation`."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        return (self.kernel - 1) * self.dilation

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == 1 and self.stride == 1 and self.padding == 0

    def read_by(self, count: int, size: int) -> Window:
        """Positions of a dimension of size `size` that `count` windows of each rank read."""
        length = self.stride * (count - 1) + self.reach + 1
        return Window(-self.padding, self.stride * count, length, size)

    def looking_at(self, count: int, num_windows: int) -> Window:
        """Windows that read any of `count` positions of each rank. Their number differs by rank; the length is the
        largest."""
        first = self.padding - self.reach + self.stride - 1  # rounded up
        length = (count - 1 + self.reach) // self.stride + 1
        return Window(first, count, length, num_windows, divisor=self.stride)

    def spread(self, num_windows: int) -> int:
        """Number of positions that `num_windows` windows read."""
        return self.stride * (num_windows - 1) + self.reach + 1


def take_local_positions(mesh: Mesh, spread: Tensor, axis: int, dim: int, window: Window, geometry: Geometry) -> Tensor:
    """This rank's positions of `spread`, over which the windows that it has fetched (`Geometry.looking_at`) are spread;
    zeros where no window reaches."""
    index = mesh.indices[axis]
    first = window.step * index + geometry.padding - window.start(index) * geometry.stride
    return halo.cut(spread, dim, first, window.step)


def convolution_weight(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Gradient of a convolution's weights."""
    template = x.new_empty(gradient.shape[1], x.shape[1] // groups, *kernel)
    return aten.convolution_backward.default(
        gradient, x, template, None, stride, padding, dilation, False, [0] * len(kernel), groups, [False, True, False]
    )[1]


def max_pool(x: Tensor, kernel: Sequence[int], *geometry: Any) -> tuple[Tensor, Tensor]:
    """(largest values of windows, their positions in the plane of all spatial dimensions)."""
    pool = aten.max_pool2d_with_indices if len(kernel) == 2 else aten.max_pool3d_with_indices
    return pool.default(x, kernel, *geometry)


def max_pool_part(
    mesh: Mesh, rows: Tensor, axis: int, dim: int, window: Window, size: int, kernel: Sequence[int], *geometry: Any
) -> tuple[Tensor, Tensor]:
    """`max_pool` of this rank's window of a dimension of length `size`. Positions are those in the whole plane."""
    values, places = max_pool(rows, kernel, *geometry)
    inner, length = rows.shape[dim + 1 :].numel(), rows.shape[dim]
    position = (places // inner % length + window.start(mesh.indices[axis])).clamp(0, size - 1)
    return values, (places // (inner * length) * size + position) * inner + places % inner


def max_pool_gradient(
    gradient: Tensor, places: Tensor, size: Sequence[int], kernel: Sequence[int], *geometry: Any
) -> Tensor:
    """Gradient of `max_pool`'s operand, whose spatial dimensions are `size` long."""
    template = gradient.new_empty(*gradient.shape[: -len(size)], *size)
    backward = aten.max_pool2d_with_indices_backward if len(size) == 2 else aten.max_pool3d_with_indices_backward
    return backward.default(gradient, template, kernel, *geometry, places)


def max_pool_gradient_part(
    mesh: Mesh, gradient: Tensor, places: Tensor, axis: int, dim: int, window: Window, size: Sequence[int]
) -> Tensor:
    """This rank's part of `max_pool_gradient` along one dimension, from its part of the windows."""
    lead = gradient.dim() - len(size)
    count, length = window.step, size[dim - lead]
    local = [*size[: dim - lead], count, *size[dim - lead + 1 :]]
    inner = torch.Size(size[dim - lead + 1 :]).numel()
    gradient = halo.fetch(mesh, [gradient], axis, dim, [window])
    places = halo.fetch(mesh, [places], axis, dim, [window])
    position = places // inner % length - count * mesh.indices[axis]
    is_local = (position >= 0) & (position < count)
    places = (places // (inner * length) * count + position) * inner + places % inner
    zeros = gradient.new_zeros(*gradient.shape[:lead], torch.Size(local).numel())
    return zeros.scatter_add(
        -1,
        torch.where(is_local, places, 0).flatten(lead),
        torch.where(is_local, gradient, torch.zeros_like(gradient)).flatten(lead),
    ).unflatten(-1, local)


def avg_pool(x: Tensor, kernel: Sequence[int], *geometry: Any) -> Tensor:
    return (aten.avg_pool2d if len(kernel) == 2 else aten.avg_pool3d).default(x, kernel, *geometry)


def avg_pool_gradient(gradient: Tensor, size: Sequence[int], kernel: Sequence[int], *geometry: Any) -> Tensor:
    """Gradient of `avg_pool`'s operand, whose spatial dimensions are `size` long."""
    template = gradient.new_empty(*gradient.shape[: -len(size)], *size)
    backward = aten.avg_pool2d_backward if len(size) == 2 else aten.avg_pool3d_backward
    return backward.default(gradient, template, kernel, *geometry)


def divide_window_sums(
    mesh: Mesh,
    sums: Tensor,
    axis: int,
    dim: int,
    begins: Window,
    geometries: Sequence[Geometry],
    size: Sequence[int],
    with_padding: bool,
    divisor: int | None,
) -> Tensor:
    """Sums of windows, divided by the number of positions in each window or by `divisor`. Along `dim`, this rank's
    first window begins where `begins` does. `size` has the lengths of the operand's spatial dimensions. Means of
    integers are integers, as in torch."""
    rounding = None if sums.is_floating_point() else "trunc"
    if divisor is not None:
        return torch.div(sums, divisor, rounding_mode=rounding)
    lead = sums.dim() - len(size)
    for index, (geometry, length) in enumerate(zip(geometries, size, strict=True)):
        first = begins.start(mesh.indices[axis]) if lead + index == dim else 0
        windows = torch.arange(first, first + sums.shape[lead + index], device=sums.device)
        begin = windows * geometry.stride - geometry.padding
        end = (begin + geometry.kernel).clamp(max=length + geometry.padding)
        if not with_padding:
            begin, end = begin.clamp(min=0), end.clamp(max=length)
        counts = (end - begin).clamp(min=1)  # windows of padding are empty
        counts = counts.view(-1, *[1] * (len(size) - 1 - index)).to(sums.dtype)
        sums = torch.div(sums, counts, rounding_mode=rounding)
    return sums
