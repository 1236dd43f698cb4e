"""Tiles of the experts' rows, loops over the inner dimension, and activations, for all kernels of grouped products."""

import triton
import triton.language as tl

_WIDENS = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether operands are widened before they are multiplied: Triton's interpreter multiplies bfloat16 as integers."""


@triton.jit
def row_tile(tile, first_row_ptr, num_experts, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """(expert, first row, end of the expert's rows) of the tile number `tile` of at most `BLOCK_ROWS` rows of one
    expert; expert `num_experts` beyond the last tile."""
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    first = tl.load(first_row_ptr + experts, mask=is_expert, other=0)
    end = tl.load(first_row_ptr + experts + 1, mask=is_expert, other=0)
    last_tile = tl.cumsum((end - first + BLOCK_ROWS - 1) // BLOCK_ROWS, axis=0)
    expert = tl.sum(((last_tile <= tile) & is_expert).to(tl.int32), axis=0)
    tiles_before = tl.max(tl.where((experts < expert) & is_expert, last_tile, 0), axis=0)
    is_row = expert < num_experts
    first_row = tl.load(first_row_ptr + expert, mask=is_row, other=0) + (tile - tiles_before) * BLOCK_ROWS
    return expert, first_row, tl.load(first_row_ptr + expert + 1, mask=is_row, other=0)


@triton.jit
def multiply(x, w, sums, PRECISION: tl.constexpr):
    """`sums` + x · w, summed in float32."""
    if _WIDENS:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, acc=sums, input_precision=PRECISION)


@triton.jit
def weight_tile(
    w, expert, first_inner, first_column, width, num_columns, stride_inner, stride_column, ACCESS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_INNER, BLOCK_COLUMNS]`: tile of one expert's matrix `[width, num_columns]`; zero beyond it.

    `ACCESS` says what `w` is: `pointers`, a pointer to this matrix; `tma`, a tensor descriptor of all experts'
    matrices; or `tma_transposed`, one of the transposed matrices.
    """
    if ACCESS == "pointers":
        inner, column = first_inner + tl.arange(0, BLOCK_INNER), first_column + tl.arange(0, BLOCK_COLUMNS)
        mask = (inner < width)[:, None] & (column < num_columns)[None, :]
        tile = tl.load((w + column * stride_column)[None, :] + inner[:, None] * stride_inner, mask=mask, other=0.0)
    elif ACCESS == "tma":
        tile = tl.reshape(w.load([expert, first_inner, first_column]), (BLOCK_INNER, BLOCK_COLUMNS))
    else:
        tl.static_assert(ACCESS == "tma_transposed")
        tile = tl.reshape(w.load([expert, first_column, first_inner]), (BLOCK_COLUMNS, BLOCK_INNER)).trans()
    return tile


@triton.jit
def multiply_rows(
    sums, x_ptr, x_rows, is_row, w, expert, first_column, num_columns, x_width, stride_e, stride_inner, stride_column,
    ACCESS: tl.constexpr, BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`sums` + x[x_rows] · w[expert][:, columns from `first_column`], for `x` with contiguous rows of `x_width`. `w` is
    a pointer or a descriptor (`weight_tile`)."""
    if ACCESS == "pointers":
        w += expert.to(tl.int64) * stride_e
    x_pointers = x_ptr + x_rows.to(tl.int64) * x_width
    for first in range(0, x_width, BLOCK_INNER):
        inner = first + tl.arange(0, BLOCK_INNER)
        is_inner = inner < x_width
        x = tl.load(x_pointers[:, None] + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        tile = weight_tile(
            w, expert, first, first_column, x_width, num_columns, stride_inner, stride_column, ACCESS, BLOCK_INNER,
            sums.shape[1],
        )  # fmt: skip
        sums = multiply(x, tile, sums, PRECISION)
    return sums


@triton.jit
def multiply_rows_by_two(
    sums_1, sums_2, x_ptr, x_rows, is_row, w_1, w_2, expert, first_column, num_columns, x_width, stride_e,
    stride_inner, stride_column, ACCESS: tl.constexpr, BLOCK_INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`multiply_rows` with two matrices of the same layout; `x` is read once."""
    if ACCESS == "pointers":
        w_1 += expert.to(tl.int64) * stride_e
        w_2 += expert.to(tl.int64) * stride_e
    x_pointers = x_ptr + x_rows.to(tl.int64) * x_width
    for first in range(0, x_width, BLOCK_INNER):
        inner = first + tl.arange(0, BLOCK_INNER)
        is_inner = inner < x_width
        x = tl.load(x_pointers[:, None] + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        tile = weight_tile(
            w_1, expert, first, first_column, x_width, num_columns, stride_inner, stride_column, ACCESS, BLOCK_INNER,
            sums_1.shape[1],
        )  # fmt: skip
        sums_1 = multiply(x, tile, sums_1, PRECISION)
        tile = weight_tile(
            w_2, expert, first, first_column, x_width, num_columns, stride_inner, stride_column, ACCESS, BLOCK_INNER,
            sums_2.shape[1],
        )  # fmt: skip
        sums_2 = multiply(x, tile, sums_2, PRECISION)
    return sums_1, sums_2


@triton.jit
def activate(up, gate, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Hidden states, from float32 products."""
    if ACTIVATION == "relu":
        hidden = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "gelu":
        hidden = up * _normal_cdf(up)
    elif ACTIVATION == "swiglu":
        hidden = up * gate * _logistic(gate)
    elif ACTIVATION == "geglu":
        hidden = up * gate * _normal_cdf(gate)
    elif ACTIVATION == "geglu_tanh":
        hidden = up * gate * _tanh_cdf(gate)
    else:
        tl.static_assert(ACTIVATION == "swiglu_clamped")
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        hidden = (_clamp(up, LIMIT) + 1) * gate * _logistic(ALPHA * gate)
    return hidden


@triton.jit
def activation_gradients(d_hidden, up, gate, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ACTIVATION: tl.constexpr):
    """Gradients of `up` and `gate`; the second is meaningless if the activation is not gated."""
    d_gate = d_hidden
    if ACTIVATION == "relu":
        d_up = tl.where(up > 0, d_hidden, 0.0)
    elif ACTIVATION == "gelu":
        d_up = d_hidden * (_normal_cdf(up) + up * _normal_density(up))
    elif ACTIVATION == "swiglu":
        share = _logistic(gate)
        d_up = d_hidden * gate * share
        d_gate = d_hidden * up * share * (1 + gate * (1 - share))
    elif ACTIVATION == "geglu":
        cdf = _normal_cdf(gate)
        d_up = d_hidden * gate * cdf
        d_gate = d_hidden * up * (cdf + gate * _normal_density(gate))
    elif ACTIVATION == "geglu_tanh":
        cdf = _tanh_cdf(gate)
        d_up = d_hidden * gate * cdf
        slope = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
        d_gate = d_hidden * up * cdf * (1 + gate * (1 - cdf) * slope)
    else:
        tl.static_assert(ACTIVATION == "swiglu_clamped")
        clamped = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        share = _logistic(ALPHA * clamped)
        d_up = tl.where(tl.abs(up) > LIMIT, 0.0, d_hidden * clamped * share)
        d_gate = d_hidden * (_clamp(up, LIMIT) + 1) * share * (1 + ALPHA * clamped * (1 - share))
        d_gate = tl.where(gate > LIMIT, 0.0, d_gate)
    return d_up, d_gate


@triton.jit
def _clamp(x, LIMIT: tl.constexpr):
    x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _logistic(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _normal_cdf(x):
    return 0.5 * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_cdf(x):
    """The normal CDF as the tanh approximation of GELU has it."""
    return _logistic(1.5957691216057308 * x * (1 + 0.044715 * x * x))


@triton.jit
def _normal_density(x):
    return 0.3989422804014327 * tl.exp(-0.5 * x * x)
