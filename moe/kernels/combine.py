"""Sums of the experts' rows by token, in one pass and in the order of preference."""

import triton
import triton.language as tl


@triton.jit
def combine(
    rows_ptr, row_ptr, weight_ptr, y_ptr, width, PER_TOKEN: tl.constexpr, IS_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`y` `[T, width]`: the sum of each token's rows, times their weights if `IS_WEIGHTED`. Moves the rows once."""
    token = tl.program_id(0)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_column = column < width
        sums = tl.zeros((BLOCK,), tl.float32)
        for choice in range(PER_TOKEN):
            row = tl.load(row_ptr + token * PER_TOKEN + choice)
            values = tl.load(rows_ptr + row.to(tl.int64) * width + column, mask=is_column & (row >= 0), other=0.0)
            values = values.to(tl.float32)
            if IS_WEIGHTED:
                values *= tl.load(weight_ptr + token * PER_TOKEN + choice).to(tl.float32)
            sums += values
        tl.store(y_ptr + token.to(tl.int64) * width + column, sums.to(y_ptr.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def gradients_of_weights(
    partial_ptr, row_ptr, expert_ptr, d_y_ptr, b_out_ptr, d_weight_ptr, num_rows, width, first_bias, num_bias,
    PER_TOKEN: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`d_weight` `[T, K]`: sum of the parts `[PARTS, n]` of each choice's row, plus d_y · b_out[e]; 0 if not kept.
    Moves the parts once, and d_y once per choice if there is a bias."""
    token = tl.program_id(0)
    for choice in range(PER_TOKEN):
        row = tl.load(row_ptr + token * PER_TOKEN + choice)
        part = tl.arange(0, BLOCK_PARTS)
        pointers = partial_ptr + part.to(tl.int64) * num_rows + row
        total = tl.sum(tl.load(pointers, mask=(part < PARTS) & (row >= 0), other=0.0), axis=0)
        if HAS_BIAS:
            expert = tl.load(expert_ptr + token * PER_TOKEN + choice)
            for first in range(0, num_bias, BLOCK):
                column = first + tl.arange(0, BLOCK)
                mask = (column < num_bias) & (row >= 0)
                d_y = tl.load(d_y_ptr + token.to(tl.int64) * width + first_bias + column, mask=mask, other=0.0)
                bias = tl.load(b_out_ptr + expert * num_bias + column, mask=mask, other=0.0)
                total += tl.sum(d_y.to(tl.float32) * bias.to(tl.float32), axis=0)
        tl.store(d_weight_ptr + token * PER_TOKEN + choice, total.to(d_weight_ptr.dtype.element_ty))


@triton.jit
def sum_by_expert(
    rows_ptr, choice_ptr, first_row_ptr, weight_ptr, sum_ptr, width, first_column, num_columns,
    PER_TOKEN: tl.constexpr, GATHERS: tl.constexpr, ADDS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`sum` `[E, num_columns]`: sums of each expert's rows from column `first_column` on, written or added; with
    `GATHERS`, of the tokens' rows times their weights. Moves the rows once."""
    expert = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    sums = tl.zeros((BLOCK,), tl.float32)
    end = tl.load(first_row_ptr + expert + 1)
    for first in range(tl.load(first_row_ptr + expert), end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        is_row = row < end
        source = row
        if GATHERS:
            choice = tl.load(choice_ptr + row, mask=is_row, other=0)
            source = choice // PER_TOKEN
        offsets = source.to(tl.int64)[:, None] * width + first_column + column[None, :]
        values = tl.load(rows_ptr + offsets, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
        if GATHERS:
            values *= tl.load(weight_ptr + choice, mask=is_row, other=0.0).to(tl.float32)[:, None]
        sums += tl.sum(values, axis=0)
    pointers = sum_ptr + expert * num_columns + column
    if ADDS:
        sums += tl.load(pointers, mask=is_column, other=0.0).to(tl.float32)
    tl.store(pointers, sums.to(sum_ptr.dtype.element_ty), mask=is_column)
