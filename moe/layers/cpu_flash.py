"""torch's flash attention kernel for CPUs, with what `scaled_dot_product_attention` does not expose: the log-sum-exp of
each query, a mask in addition to `is_causal`, which skips half of the work (documents in [1, 8, 2048, 64] cost 11% more
than causal attention), and a tiled backward pass.

Shapes: B rows, n query heads, m key and value heads (n a multiple of m), N queries, L keys, and one width d.
"""

import torch
from torch import Tensor

QUERIES_PER_TILE = 256
"""Queries per tile of the backward pass."""
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

KernelOperands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""(gradient, queries, keys, values, outputs, log-sum-exp)"""
InputGradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


def flash_attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """(outputs `[B, n, N, d]`, log-sum-exp of scores `[B, n, N]`, at least float32). A query whose bias is -inf for all
    keys has outputs and log-sum-exp of 0."""
    out, log_sum = _FLASH(queries, keys, values, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out, log_sum


def flash_gradients(operands: KernelOperands, bias: Tensor | None, scale: float, *, is_causal: bool) -> InputGradients:
    """Input gradients, in tiles where that is faster. With z the log-sum-exp and o the outputs, the kernel uses them
    only for the probabilities exp(s - z) and for rowsum(do · o): given those of a softmax over more columns, it returns
    that softmax's gradients."""
    if is_causal and is_faster_in_tiles(operands[1].shape[2]):
        return _gradients_in_tiles(operands, bias, scale)
    return _gradients(operands, bias, scale, is_causal=is_causal)


def is_faster_in_tiles(num_positions: int) -> bool:
    """Whether the backward pass of causal attention is faster in tiles: the kernel takes 512 keys at a time, even if
    none of its queries sees them. [4, 8, 512, 64] with 2 key heads on two EPYC cores: 45 ms instead of 55; 1,024
    positions: 66 either way."""
    return QUERIES_PER_TILE < num_positions <= 4 * QUERIES_PER_TILE


def with_dense_rows(x: Tensor) -> Tensor:
    """Return `x` with a contiguous last dimension, which the kernel assumes."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gradients(operands: KernelOperands, bias: Tensor | None, scale: float, *, is_causal: bool) -> InputGradients:
    gradients: InputGradients = _FLASH_BACKWARD(*operands, 0.0, is_causal, attn_mask=bias, scale=scale)
    return gradients


def _gradients_in_tiles(operands: KernelOperands, bias: Tensor | None, scale: float) -> InputGradients:
    """Input gradients of causal attention as a sum over tiles: each block of queries with its own positions, and with
    all earlier ones. Probabilities are those of full rows, since the log-sum-exp is."""
    gradient, queries, keys, values, out, log_sum = operands
    wide = torch.promote_types(queries.dtype, torch.float32)
    sums = [torch.zeros_like(tensor, dtype=wide) for tensor in (queries, keys, values)]
    num_positions = queries.shape[2]

    def add(query_slice: slice, key_slice: slice, *, is_causal: bool) -> None:
        tile = (
            gradient[:, :, query_slice], queries[:, :, query_slice], keys[:, :, key_slice], values[:, :, key_slice],
            out[:, :, query_slice], log_sum[:, :, query_slice],
        )  # fmt: skip
        tile_bias = None if bias is None else bias[..., query_slice, key_slice]
        parts = _gradients(tile, tile_bias, scale, is_causal=is_causal)
        for total, part, positions in zip(sums, parts, (query_slice, key_slice, key_slice), strict=True):
            total[:, :, positions] += part

    for start in range(0, num_positions, QUERIES_PER_TILE):
        block = slice(start, min(start + QUERIES_PER_TILE, num_positions))
        add(block, block, is_causal=True)
        if start:
            add(block, slice(0, start), is_causal=False)
    d_queries, d_keys, d_values = (total.to(queries.dtype) for total in sums)
    return d_queries, d_keys, d_values
