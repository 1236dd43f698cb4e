"""Rotary embedding of heads in one pass, in either memory order of heads and positions."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.launch import launching_on

_ELEMENTS = 1 << 12
"""Most elements of a tile of rotated, or of unrotated, columns."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """`moe.layers.rotary.rotate` of heads `x` `[B, n, L, d]`, of at most four bytes per element, by tables
    `[B or 1, 1, L, r / 2]`."""
    with launching_on(x.device):  # in the backward pass, autograd makes it current
        return _RotateRows.apply(x, cos.contiguous(), sin.contiguous(), interleaved)


class _RotateRows(torch.autograd.Function):
    """Rotates back in the backward pass; saves only the tables, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved=interleaved, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, sin, interleaved=ctx.interleaved, inverse=True), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    y = torch.empty_like(x)
    if x.stride(-1) != 1 or y.stride(-1) != 1:
        x = x.contiguous()
        y = torch.empty_like(x)
    num_rows, width = x.shape[:-1].numel(), x.shape[-1]
    num_pairs = cos.shape[-1]
    block_pairs, rest = triton.next_power_of_2(num_pairs), width - 2 * num_pairs
    block_rest = triton.next_power_of_2(rest) if rest else 0
    block_rows = max(1, _ELEMENTS // max(2 * block_pairs, block_rest))
    if x.numel():
        rotate_rows[triton.cdiv(num_rows, block_rows),](
            x, cos, sin, y, num_rows, x.shape[1], x.shape[2], num_pairs, width, *x.stride()[:3], *y.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0, INVERSE=inverse, INTERLEAVED=interleaved,
            HEADS_FIRST=y.stride(1) > y.stride(2), BLOCK_ROWS=block_rows, PAIRS=block_pairs,
            UNROTATED=block_rest,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_positions"])
def rotate_rows(
    x_ptr, cos_ptr, sin_ptr, y_ptr, num_rows, num_heads, num_positions, num_pairs, width, stride_b, stride_n, stride_l,
    y_stride_b, y_stride_n, y_stride_l, table_stride_b, INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS_FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr, PAIRS: tl.constexpr, UNROTATED: tl.constexpr,
):  # fmt: skip
    """`y`: `x` with its first pairs rotated, backwards if `INVERSE`, and the other columns copied. Rows are enumerated
    in the order of `y` in memory. Moves x and y once, and the tables once per cache miss."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    batch = row // num_positions // num_heads
    if HEADS_FIRST:
        head, position = row // num_positions % num_heads, row % num_positions
    else:
        head, position = row % num_heads, row // num_heads % num_positions
    x_row = x_ptr + (batch * stride_b + head * stride_n + position * stride_l)[:, None]
    y_row = y_ptr + (batch * y_stride_b + head * y_stride_n + position * y_stride_l)[:, None]

    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = is_row[:, None] & (pair < num_pairs)
    table = batch[:, None] * table_stride_b + position[:, None] * num_pairs + pair
    cos = tl.load(cos_ptr + table, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=is_pair, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        mask = is_row[:, None] & (column < 2 * num_pairs)
        values = tl.load(x_row + column, mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(values, (BLOCK_ROWS, PAIRS, 2)))
        rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
        rotated = tl.reshape(rotated, (BLOCK_ROWS, 2 * PAIRS))
        tl.store(y_row + column, rotated.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        first = tl.load(x_row + pair, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(x_row + num_pairs + pair, mask=is_pair, other=0.0).to(tl.float32)
        tl.store(y_row + pair, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=is_pair)
        tl.store(y_row + num_pairs + pair, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=is_pair)
    if UNROTATED > 0:
        column = 2 * num_pairs + tl.arange(0, UNROTATED)[None, :]
        mask = is_row[:, None] & (column < width)
        tl.store(y_row + column, tl.load(x_row + column, mask=mask, other=0.0), mask=mask)
