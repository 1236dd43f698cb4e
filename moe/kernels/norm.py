"""RMS norm and its gradients, each in one pass over the rows."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.launch import launching_on

_ELEMENTS = 1 << 11
"""Elements of one tile, which the registers of a program hold."""
MAX_PARTS = 256
"""Most programs of the backward pass; each writes one partial sum of the weight gradient."""


class RowLayout(NamedTuple):
    """Rows of a tensor in memory: row i starts at (i // group_rows) · stride_group + (i % group_rows) · stride_row."""

    num_rows: int
    width: int
    group_rows: int
    stride_group: int
    stride_row: int


class Tile(NamedTuple):
    rows: int
    columns: int
    num_warps: int

    @classmethod
    def of_width(cls, width: int) -> "Tile":
        """Tile for rows of `width` elements, which it contains whole."""
        columns = triton.next_power_of_2(max(1, width))
        return cls(max(1, _ELEMENTS // columns), columns, 4 if columns <= 2 * _ELEMENTS else 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    """`moe.layers.norm.rms_norm` of `x` `[..., M]`, of at most four bytes per element: one kernel forward; one
    backward, followed by torch's sum of its partial sums."""
    with launching_on(x.device):  # in the backward pass, autograd makes it current
        return _NormalizeRows.apply(x, weight, eps, one_plus)


class _NormalizeRows(torch.autograd.Function):
    """Saves `x` and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
        layout = _layout_of(x)
        if layout is None:
            x = x.contiguous()
            layout = _layout_of(x)
            assert layout is not None, "contiguous rows are one run"
        weight, tile = weight.contiguous(), Tile.of_width(layout.width)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rate = torch.empty(layout.num_rows, dtype=torch.float32, device=x.device)
        if x.numel():
            normalize[triton.cdiv(layout.num_rows, tile.rows),](
                x, weight, y, rate, *layout, eps, ONE_PLUS=one_plus, BLOCK_ROWS=tile.rows, BLOCK=tile.columns,
                num_warps=tile.num_warps,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, rate)
        ctx.layout, ctx.one_plus = layout, one_plus
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rate = ctx.saved_tensors
        layout: RowLayout = ctx.layout
        tile, needs_weight = Tile.of_width(layout.width), ctx.needs_input_grad[1]
        num_tiles = triton.cdiv(layout.num_rows, tile.rows)
        tiles_per_part = triton.cdiv(num_tiles, MAX_PARTS)
        num_parts = triton.cdiv(num_tiles, max(1, tiles_per_part))
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        parts = rate if not needs_weight else rate.new_empty(num_parts, layout.width)
        if x.numel():
            normalize_backward[num_parts,](
                gradients[0].contiguous(), x, weight, rate, d_x, parts, *layout, tiles_per_part,
                ONE_PLUS=ctx.one_plus, HAS_WEIGHT_GRADIENT=needs_weight, BLOCK_ROWS=tile.rows, BLOCK=tile.columns,
                num_warps=tile.num_warps,
            )  # fmt: skip
        return d_x, parts.sum(0).to(weight.dtype) if needs_weight else None, None, None


def _layout_of(x: Tensor) -> RowLayout | None:
    """Layout of the rows of `x`; None if `RowLayout` cannot express it, or a row's elements are not contiguous."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        elif size != 1:
            runs.append((size, stride))
    width = x.shape[-1]
    if x.numel() and ((width > 1 and x.stride(-1) != 1) or len(runs) > 2):
        return None
    (_, stride_group), (group_rows, stride_row) = [(1, 0), *runs][-2:] if runs else [(1, 0), (1, width)]
    return RowLayout(x.numel() // max(1, width), width, group_rows, stride_group, stride_row)


@triton.jit(do_not_specialize=["num_rows", "group_rows"])
def normalize(
    x_ptr, weight_ptr, y_ptr, rate_ptr, num_rows, width, group_rows, stride_group, stride_row, eps,
    ONE_PLUS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`rate` = 1 / √(mean(x²) + eps) of each row, and `y` = x · rate · weight. Moves x once and y once."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    is_row = row < num_rows
    mask = is_row[:, None] & (column < width)[None, :]
    start = row // group_rows * stride_group + row % group_rows * stride_row
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    rate = 1 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    y = x * rate[:, None] * _scale_of(weight_ptr, column, width, ONE_PLUS)[None, :]
    tl.store(rate_ptr + row, rate, mask=is_row)
    tl.store(y_ptr + row[:, None] * width + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "group_rows", "tiles_per_part"])
def normalize_backward(
    d_y_ptr, x_ptr, weight_ptr, rate_ptr, d_x_ptr, part_ptr, num_rows, width, group_rows, stride_group, stride_row,
    tiles_per_part, ONE_PLUS: tl.constexpr, HAS_WEIGHT_GRADIENT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of x, and the sums over each program's rows of that of the weight, `part` `[programs, width]`. Moves
    d_y, x and d_x once each."""
    column = tl.arange(0, BLOCK)
    is_column = column < width
    scale = _scale_of(weight_ptr, column, width, ONE_PLUS)[None, :]
    sums = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0) * tiles_per_part
    for tile in range(first, tl.minimum(first + tiles_per_part, tl.cdiv(num_rows, BLOCK_ROWS))):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = row < num_rows
        mask = is_row[:, None] & is_column[None, :]
        start = row // group_rows * stride_group + row % group_rows * stride_row
        x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        offsets = row[:, None] * width + column[None, :]
        d_y = tl.load(d_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rate = tl.load(rate_ptr + row, mask=is_row, other=0.0)
        normalized = x * rate[:, None]
        d_normalized = d_y * scale
        mean = tl.sum(d_normalized * normalized, axis=1) / width
        d_x = (d_normalized - normalized * mean[:, None]) * rate[:, None]
        tl.store(d_x_ptr + offsets, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
        if HAS_WEIGHT_GRADIENT:
            sums += tl.sum(d_y * normalized, axis=0)
    if HAS_WEIGHT_GRADIENT:
        tl.store(part_ptr + tl.program_id(0) * width + column, sums, mask=is_column)


@triton.jit
def _scale_of(weight_ptr, column, width, ONE_PLUS: tl.constexpr):
    scale = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1
    return scale
