"""Grouped products of the experts: rows gathered as they are loaded, activation and its gradient in the epilogues.

Programs take tiles in turn: rows of one expert, found by the counts on the device, by columns. Sums are float32
and in a fixed order, so results are the same in every run.
"""

import triton
import triton.language as tl

from moe.kernels.tiles import activate, activation_gradients, multiply, multiply_rows, multiply_rows_by_two, row_tile


@triton.jit(do_not_specialize=["num_tiles"])
def first_products(
    x_ptr, choice_ptr, first_row_ptr, w_in, w_gate, b_in_ptr, b_gate_ptr, low_ptr, lora_in_ptr, lora_gate_ptr,
    up_ptr, gate_ptr, hidden_ptr, num_experts, num_tiles, model_dim, hidden_dim, stride_e, stride_m, stride_h,
    PER_TOKEN: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GATE_BIAS: tl.constexpr, IS_GATED: tl.constexpr, WRITES_PRODUCTS: tl.constexpr, WRITES_HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
    ACCESS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """`hidden` = act(up, gate) `[n, H]`, with up = x[token] · w_in[e] + low · lora_in[e] + b_in[e] and likewise gate.

    `up` and `gate` are saved if `WRITES_PRODUCTS`; `hidden` is written if `WRITES_HIDDEN`. `ACCESS` says what `w_in`
    and `w_gate` are (`weight_tile`). Moves tokens, matrices and each result once, as far as caches hold shared tiles.
    """
    column_tiles = tl.cdiv(hidden_dim, BLOCK_COLUMNS)
    for tile in range(tl.program_id(0), num_tiles * column_tiles, tl.num_programs(0)):
        expert, first, end = row_tile(tile // column_tiles, first_row_ptr, num_experts, EXPERTS, BLOCK_ROWS)
        if expert < num_experts:
            row = first + tl.arange(0, BLOCK_ROWS)
            is_row = row < end
            first_column = (tile % column_tiles) * BLOCK_COLUMNS
            column = first_column + tl.arange(0, BLOCK_COLUMNS)
            is_column = column < hidden_dim
            token = tl.load(choice_ptr + row, mask=is_row, other=0) // PER_TOKEN
            up = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            gate = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            if IS_GATED:
                up, gate = multiply_rows_by_two(
                    up, gate, x_ptr, token, is_row, w_in, w_gate, expert, first_column, hidden_dim, model_dim, stride_e,
                    stride_m, stride_h, ACCESS, BLOCK_INNER, PRECISION,
                )  # fmt: skip
            else:
                up = multiply_rows(
                    up, x_ptr, token, is_row, w_in, expert, first_column, hidden_dim, model_dim, stride_e, stride_m,
                    stride_h, ACCESS, BLOCK_INNER, PRECISION,
                )  # fmt: skip
            if RANK > 0:
                if IS_GATED:
                    up, gate = multiply_rows_by_two(
                        up, gate, low_ptr, row, is_row, lora_in_ptr, lora_gate_ptr, expert, first_column, hidden_dim,
                        RANK, RANK * hidden_dim, hidden_dim, 1, "pointers", BLOCK_RANK, PRECISION,
                    )  # fmt: skip
                else:
                    up = multiply_rows(
                        up, low_ptr, row, is_row, lora_in_ptr, expert, first_column, hidden_dim, RANK,
                        RANK * hidden_dim, hidden_dim, 1, "pointers", BLOCK_RANK, PRECISION,
                    )  # fmt: skip
            bias = expert * hidden_dim + column
            if HAS_BIAS:
                up += tl.load(b_in_ptr + bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if HAS_GATE_BIAS:
                gate += tl.load(b_gate_ptr + bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
            tile_start = first.to(tl.int64) * hidden_dim
            offsets = tl.arange(0, BLOCK_ROWS)[:, None] * hidden_dim + column[None, :]
            mask = is_row[:, None] & is_column[None, :]
            if WRITES_PRODUCTS:
                tl.store(up_ptr + tile_start + offsets, up.to(up_ptr.dtype.element_ty), mask=mask)
                if IS_GATED:
                    tl.store(gate_ptr + tile_start + offsets, gate.to(gate_ptr.dtype.element_ty), mask=mask)
            if WRITES_HIDDEN:
                hidden = activate(up, gate, ALPHA, LIMIT, ACTIVATION)
                tl.store(hidden_ptr + tile_start + offsets, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles"])
def product(
    y_ptr, first_row_ptr, choice_ptr, x_1_ptr, w_1, x_2_ptr, w_2, x_3_ptr, w_3, bias_ptr, num_experts,
    num_tiles, num_columns, width_1, width_2, width_3, stride_e_1, stride_inner_1, stride_column_1, stride_e_2,
    stride_inner_2, stride_column_2, stride_e_3, stride_inner_3, stride_column_3, first_bias, num_bias, scale,
    PER_TOKEN: tl.constexpr, GATHERS: tl.constexpr, TERMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, ACCESS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """`y` = scale · (x_1 · w_1[e] + x_2 · w_2[e] + x_3 · w_3[e]) + bias[e] `[n, columns]`, of the first `TERMS` terms.

    Rows of `x_1` are those of the tokens if `GATHERS`. `bias` `[E, num_bias]` is added from column `first_bias` on.
    `ACCESS` says what the matrices are (`weight_tile`). Moves rows, matrices and `y` once, as far as caches hold shared
    tiles.
    """
    column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    for tile in range(tl.program_id(0), num_tiles * column_tiles, tl.num_programs(0)):
        expert, first, end = row_tile(tile // column_tiles, first_row_ptr, num_experts, EXPERTS, BLOCK_ROWS)
        if expert < num_experts:
            row = first + tl.arange(0, BLOCK_ROWS)
            is_row = row < end
            first_column = (tile % column_tiles) * BLOCK_COLUMNS
            column = first_column + tl.arange(0, BLOCK_COLUMNS)
            is_column = column < num_columns
            x_row = row
            if GATHERS:
                x_row = tl.load(choice_ptr + row, mask=is_row, other=0) // PER_TOKEN
            y = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            y = multiply_rows(
                y, x_1_ptr, x_row, is_row, w_1, expert, first_column, num_columns, width_1, stride_e_1,
                stride_inner_1, stride_column_1, ACCESS, BLOCK_INNER, PRECISION,
            )  # fmt: skip
            if TERMS > 1:
                y = multiply_rows(
                    y, x_2_ptr, row, is_row, w_2, expert, first_column, num_columns, width_2, stride_e_2,
                    stride_inner_2, stride_column_2, ACCESS, BLOCK_INNER, PRECISION,
                )  # fmt: skip
            if TERMS > 2:
                y = multiply_rows(
                    y, x_3_ptr, row, is_row, w_3, expert, first_column, num_columns, width_3, stride_e_3,
                    stride_inner_3, stride_column_3, ACCESS, BLOCK_INNER, PRECISION,
                )  # fmt: skip
            y *= scale
            if HAS_BIAS:
                bias_column = column - first_bias
                has_bias = (bias_column >= 0) & (bias_column < num_bias)
                y += tl.load(bias_ptr + expert * num_bias + bias_column, mask=has_bias, other=0.0).to(tl.float32)[None]
            y_pointers = y_ptr + first.to(tl.int64) * num_columns
            y_pointers += tl.arange(0, BLOCK_ROWS)[:, None] * num_columns + column[None, :]
            tl.store(y_pointers, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_tiles", "num_rows"])
def hidden_gradients(
    d_y_ptr, choice_ptr, first_row_ptr, weight_ptr, w_out, d_low_ptr, lora_out_ptr, up_ptr, gate_ptr, d_up_ptr,
    d_gate_ptr, hidden_ptr, d_weight_ptr, num_experts, num_tiles, num_rows, model_dim, hidden_dim, stride_e, stride_h,
    stride_m,
    PER_TOKEN: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, IS_GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
    ACCESS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """Writes `d_up`, `d_gate` and weight · hidden, each `[n, H]`, from the products and the gradient `d_y` `[T, M]` of
    the tokens' sums.

    `d_weight` `[column tiles, n]` is the gradient of the rows' weights by this tile's columns of the hidden states.
    `ACCESS` says what `w_out` is (`weight_tile`). Moves products, `d_y`, the matrix and each result once, as far as
    caches hold shared tiles.
    """
    column_tiles = tl.cdiv(hidden_dim, BLOCK_COLUMNS)
    for tile in range(tl.program_id(0), num_tiles * column_tiles, tl.num_programs(0)):
        expert, first, end = row_tile(tile // column_tiles, first_row_ptr, num_experts, EXPERTS, BLOCK_ROWS)
        if expert < num_experts:
            row = first + tl.arange(0, BLOCK_ROWS)
            is_row = row < end
            first_column = (tile % column_tiles) * BLOCK_COLUMNS
            column = first_column + tl.arange(0, BLOCK_COLUMNS)
            is_column = column < hidden_dim
            choice = tl.load(choice_ptr + row, mask=is_row, other=0)
            d_hidden = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            d_hidden = multiply_rows(
                d_hidden, d_y_ptr, choice // PER_TOKEN, is_row, w_out, expert, first_column, hidden_dim, model_dim,
                stride_e, stride_m, stride_h, ACCESS, BLOCK_INNER, PRECISION,
            )  # fmt: skip
            if RANK > 0:  # lora_out `[E, H, r]`
                d_hidden = multiply_rows(
                    d_hidden, d_low_ptr, row, is_row, lora_out_ptr, expert, first_column, hidden_dim, RANK,
                    hidden_dim * RANK, 1, RANK, "pointers", BLOCK_RANK, PRECISION,
                )  # fmt: skip
            tile_start = first.to(tl.int64) * hidden_dim
            offsets = tl.arange(0, BLOCK_ROWS)[:, None] * hidden_dim + column[None, :]
            mask = is_row[:, None] & is_column[None, :]
            up = tl.load(up_ptr + tile_start + offsets, mask=mask, other=0.0).to(tl.float32)
            gate = up
            if IS_GATED:
                gate = tl.load(gate_ptr + tile_start + offsets, mask=mask, other=0.0).to(tl.float32)
            hidden = activate(up, gate, ALPHA, LIMIT, ACTIVATION)
            d_weight = tl.sum(d_hidden * hidden, axis=1)
            tl.store(d_weight_ptr + (tile % column_tiles).to(tl.int64) * num_rows + row, d_weight, mask=is_row)
            weight = tl.load(weight_ptr + choice, mask=is_row, other=0.0).to(tl.float32)[:, None]
            d_up, d_gate = activation_gradients(d_hidden * weight, up, gate, ALPHA, LIMIT, ACTIVATION)
            tl.store(hidden_ptr + tile_start + offsets, (hidden * weight).to(hidden_ptr.dtype.element_ty), mask=mask)
            tl.store(d_up_ptr + tile_start + offsets, d_up.to(d_up_ptr.dtype.element_ty), mask=mask)
            if IS_GATED:
                tl.store(d_gate_ptr + tile_start + offsets, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradient(
    x_ptr, d_y_ptr, choice_ptr, first_row_ptr, d_w_ptr, num_inputs, num_outputs,
    PER_TOKEN: tl.constexpr, GATHERS_X: tl.constexpr, GATHERS_D_Y: tl.constexpr, ADDS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_INPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """`d_w` `[E, inputs, outputs]`: x transposed · d_y over each expert's rows, written or added.

    Rows of `x` or `d_y` are those of the tokens if they are gathered. A program computes one tile of one matrix. Moves
    both operands and `d_w` once, as far as caches hold shared tiles.
    """
    output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    expert, tile = tl.program_id(1), tl.program_id(0)
    input_column = (tile // output_tiles) * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)
    output_column = (tile % output_tiles) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_input, is_output = input_column < num_inputs, output_column < num_outputs
    sums = tl.zeros((BLOCK_INPUTS, BLOCK_OUTPUTS), tl.float32)
    end = tl.load(first_row_ptr + expert + 1)
    for first in range(tl.load(first_row_ptr + expert), end, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        is_row = row < end
        x_row, d_y_row = row, row
        if GATHERS_X or GATHERS_D_Y:
            token = tl.load(choice_ptr + row, mask=is_row, other=0) // PER_TOKEN
            if GATHERS_X:
                x_row = token
            else:
                d_y_row = token
        x_offsets = x_row.to(tl.int64)[None, :] * num_inputs + input_column[:, None]
        x = tl.load(x_ptr + x_offsets, mask=is_input[:, None] & is_row[None, :], other=0.0)
        d_y_offsets = d_y_row.to(tl.int64)[:, None] * num_outputs + output_column[None, :]
        d_y = tl.load(d_y_ptr + d_y_offsets, mask=is_row[:, None] & is_output[None, :], other=0.0)
        sums = multiply(x, d_y, sums, PRECISION)
    matrix = expert.to(tl.int64) * num_inputs * num_outputs
    offsets = matrix + input_column.to(tl.int64)[:, None] * num_outputs + output_column[None, :]
    mask = is_input[:, None] & is_output[None, :]
    if ADDS:
        sums += tl.load(d_w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_w_ptr + offsets, sums.to(d_w_ptr.dtype.element_ty), mask=mask)
