"""Softmax attention with grouped queries, sliding windows, documents and attention sinks.

Shapes: B rows, n query heads, m key and value heads (n a multiple of m), N queries, the last of L positions, d and dv
head widths.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe.layers.attention_mask import AttentionMask
from moe.layers.chunked_attention import attend_in_chunks
from moe.layers.cpu_flash import flash_attend, flash_gradients, is_faster_in_tiles, with_dense_rows
from moe.layers.flex_attention import flex_attend
from moe.layers.linear import uses_own_dtype
from moe.overrides import overridable
from moe.parallel.accelerator import accelerator

QUERIES_AT_ONCE = 256
"""Queries per block with sliding windows, and where scores are materialized."""


@overridable
def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `[B, n, N, dv]`: softmax(scale · q kᵀ) v over the keys that each query sees
    (arXiv 1706.03762, equation 1).

    `queries` `[B, n, N, d]`, `keys` `[B, m, L, d]` and `values` `[B, m, L, dv]` have one dtype; key head j serves query
    heads jr to jr + r - 1, with r = n / m (arXiv 2305.13245). With `attention_mask.keys`, L may be any
    length. `sinks` `[n]` are logits, unscaled, of one more softmax column per head, without a value (GPT-OSS). Padded
    queries attend only to themselves. Raises ValueError for mismatched shapes.
    """
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    check_shapes(queries, keys, values, attention_mask)
    if num_queries == 0:
        return without_queries(queries, keys, values, sinks)
    if attention_mask.chunk is not None:
        return attend_in_chunks(attend, queries, keys, values, scale=scale, attention_mask=attention_mask, sinks=sinks)
    if runs_on_cpu(queries):
        return _attend_on_cpu(queries, keys, values, scale, attention_mask, sinks)
    if queries.dtype == torch.float64 or num_queries < QUERIES_AT_ONCE or attention_mask.keys is not None:
        # Flex attention compiles a kernel per shape, which does not pay off when decoding token by token.
        if sinks is not None:
            return attend_unfused(queries, keys, values, scale, attention_mask, sinks)
    elif sinks is not None or attention_mask.needs_mask(num_queries, num_keys):
        return flex_attend(queries, keys, values, scale=scale, attention_mask=attention_mask, sinks=sinks)
    return attend_fused(queries, keys, values, scale, attention_mask)


def attend_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Reference of `attend`: a mask built pair by pair, and sinks as a softmax column."""
    rows, heads, num_queries, _ = queries.shape
    num_keys = keys.shape[2]
    mask = torch.zeros(rows, 1, num_queries, num_keys, dtype=torch.bool)
    for row in range(rows):
        for query in range(num_queries):
            for key in range(num_keys):
                mask[row, 0, query, key] = _is_visible(attention_mask, row, num_keys - num_queries + query, key)
    repeats = heads // keys.shape[1]
    keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in (keys, values))
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(~mask.to(queries.device), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(rows, -1, num_queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(dim=-1)[..., :num_keys] @ values


def _is_visible(attention_mask: AttentionMask, row: int, query: int, key: int) -> bool:
    if attention_mask.keys is not None:
        return bool(attention_mask.keys[row, key])
    if query == key:
        return True
    if attention_mask.causal and key > query:
        return False
    if attention_mask.window is not None and query - key >= attention_mask.window:
        return False
    if attention_mask.first is not None and min(query, key) < int(attention_mask.first[row]):
        return False
    if attention_mask.chunk is not None and _chunk(attention_mask, row, query) != _chunk(attention_mask, row, key):
        return False
    if attention_mask.documents is not None:
        document = int(attention_mask.documents[row, query])
        return document >= 0 and document == int(attention_mask.documents[row, key])
    return True


def _chunk(attention_mask: AttentionMask, row: int, place: int) -> int:
    """Number of a position's chunk in its document."""
    assert attention_mask.chunk is not None
    start = -attention_mask.first_key if attention_mask.first is None else int(attention_mask.first[row])
    if attention_mask.documents is not None:
        documents = attention_mask.documents[row].tolist()
        start = place
        while start and documents[start - 1] == documents[place]:
            start -= 1
    return (place - start) // attention_mask.chunk


def without_queries(queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Outputs `[B, n, 0, dv]`, which depend on all inputs: their gradients, zeros, reach the collectives and parameters
    that other ranks' gradients reach."""
    total = queries.sum() + keys.sum() + values.sum()
    total = total if sinks is None else total + sinks.sum().to(total.dtype)
    return total * queries.new_zeros((*queries.shape[:3], values.shape[-1]))


def runs_on_cpu(x: Tensor) -> bool:
    return x.device.type == "meta" or accelerator(x.device).kind == "cpu"


def check_shapes(queries: Tensor, keys: Tensor, values: Tensor, attention_mask: AttentionMask) -> None:
    heads, kv_heads = queries.shape[1], keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"queries ({heads} heads) must have a multiple of the {kv_heads} heads of keys")
    is_longer = attention_mask.keys is None and queries.shape[2] > keys.shape[2]
    if is_longer or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"queries {tuple(queries.shape)} must be the last positions of keys {tuple(keys.shape)} "
            f"and values {tuple(values.shape)}"
        )


def _attend_on_cpu(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, attention_mask: AttentionMask, sinks: Tensor | None
) -> Tensor:
    dtype = queries.dtype
    if not uses_own_dtype(queries):
        # Forward and backward of [4, 8, 512, 64] with 2 key heads, on one EPYC core without bfloat16 instructions: 708
        # ms by the bfloat16 kernel, 135 by the float32 kernel with conversions.
        queries, keys, values = (tensor.float() for tensor in (queries, keys, values))
        return _attend_on_cpu(queries, keys, values, scale, attention_mask, sinks).to(dtype)

    width, num_queries = values.shape[-1], queries.shape[2]
    if queries.shape[-1] == width and sinks is None:  # one kernel: a small decoder notices each function call
        if attention_mask.keys is not None:
            return _attend_to_keys(queries, keys, values, scale, attention_mask)
        if num_queries == 1 and not attention_mask.needs_mask(1, keys.shape[2]):
            return functional.scaled_dot_product_attention(
                queries, keys, values, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
            )
    queries, keys, values = pad_to_one_width(queries, keys, values)
    num_visible_keys = attention_mask.num_keys(QUERIES_AT_ONCE, keys.shape[2])
    # [1, 8, 2048, 64] with windows of 128, forward and backward on one EPYC core: 141 ms in blocks, 423 at once.
    is_one_block = num_queries <= QUERIES_AT_ONCE or 2 * num_visible_keys > keys.shape[2]
    queries_per_block = num_queries if is_one_block else QUERIES_AT_ONCE
    blocks = [
        attend_in_block(
            slice(start, min(start + queries_per_block, num_queries)),
            queries,
            keys,
            values,
            scale,
            attention_mask,
            sinks,
        )
        for start in range(0, num_queries, queries_per_block)
    ]
    return (blocks[0] if is_one_block else torch.cat(blocks, dim=2))[..., :width]


def _attend_to_keys(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, attention_mask: AttentionMask
) -> Tensor:
    """Attention of all queries to the keys that `attention_mask.keys` names, without sinks."""
    mask = attention_mask.mask(queries.shape[2], keys.shape[2], queries.device)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
    )


def attend_in_block(
    block: slice,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None,
    *,
    may_tile: bool = True,
) -> Tensor:
    """Outputs for a block of queries, from the keys that any of them may see. With `attention_mask.keys`, the block
    must be all queries. With `may_tile`, the backward pass runs in tiles where that is faster."""
    if attention_mask.keys is not None:
        if sinks is not None:
            return attend_unfused(queries, keys, values, scale, attention_mask, sinks)
        return _attend_to_keys(queries, keys, values, scale, attention_mask)
    row_queries, num_keys = queries.shape[2], keys.shape[2]
    stop, num_queries = num_keys - row_queries + block.stop, block.stop - block.start
    start = stop - attention_mask.num_keys(num_queries, stop)
    bias = None
    if attention_mask.is_by_row:
        bias = attention_mask.bias(row_queries, num_keys, queries.dtype, queries.device)[..., block, start:stop]
    elif attention_mask.needs_mask(num_queries, stop - start):
        bias = attention_mask.bias(num_queries, stop - start, queries.dtype, queries.device)
    queries = queries[:, :, block]
    keys, values = keys[:, :, start:stop], values[:, :, start:stop]
    is_causal = attention_mask.causal and num_queries == keys.shape[2] > 1
    in_tiles = may_tile and is_causal and is_faster_in_tiles(num_queries)
    if sinks is None and bias is None and not in_tiles:
        # Forward and backward of [4, 8, 512, 64] with 2 key heads in float32, on two EPYC cores: 79 to 86 ms; with
        # repeated keys 87; with query groups stacked along the sequence, which needs a mask if causal, 67 to 82, but
        # for 2,048 positions 368 instead of 186. In bfloat16 all three take 400 to 480 ms.
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=is_causal, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
        )
    return _Flash.apply(queries, keys, values, sinks, bias, is_causal, scale)


class _Flash(torch.autograd.Function):
    """Flash attention on a CPU with sinks, a mask, or a tiled backward pass.

    With z = log Σ exp(s) from the kernel and the sink c, z' = log(exp(z) + exp(c)), probabilities are exp(s - z') and
    outputs o' = o · exp(z - z'). Given z' and o', the kernel returns the gradients of the softmax with sinks. The
    gradient of c is -exp(c - z') · rowsum(do' · o').
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        queries, keys, values = (with_dense_rows(tensor) for tensor in (queries, keys, values))
        out, log_sum = flash_attend(queries, keys, values, bias, scale, is_causal=is_causal)
        if sinks is not None:
            with_sink = torch.logaddexp(log_sum, sinks.to(log_sum.dtype)[:, None])
            out = (out * (log_sum - with_sink).exp_()[..., None]).to(queries.dtype)
            log_sum = with_sink
        ctx.save_for_backward(queries, keys, values, out, log_sum, sinks, bias)
        ctx.settings = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, out, log_sum, sinks, bias = ctx.saved_tensors
        is_causal, scale = ctx.settings
        gradient = with_dense_rows(gradients[0])
        operands = gradient, queries, keys, values, out, log_sum
        input_gradients = flash_gradients(operands, bias, scale, is_causal=is_causal)
        sinks_gradient = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = (sinks.to(log_sum.dtype)[:, None] - log_sum).exp_()
            dot_products = (gradient.to(log_sum.dtype) * out).sum(dim=-1)
            sinks_gradient = -(share * dot_products).sum(dim=(0, 2)).to(sinks.dtype)
        return *input_gradients, sinks_gradient, None, None, None


def attend_fused(queries: Tensor, keys: Tensor, values: Tensor, scale: float, attention_mask: AttentionMask) -> Tensor:
    """Attention on a GPU by torch's fused kernels, without sinks."""
    if attention_mask.keys is not None:
        return _attend_to_keys(queries, keys, values, scale, attention_mask)
    num_queries, groups = queries.shape[2], queries.shape[1] // keys.shape[1]
    start = keys.shape[2] - attention_mask.num_keys(num_queries, keys.shape[2])
    if not attention_mask.needs_mask(num_queries, keys.shape[2] - start):
        return functional.scaled_dot_product_attention(
            queries, keys[:, :, start:], values[:, :, start:], scale=scale, enable_gqa=groups > 1,
            is_causal=attention_mask.causal and num_queries == keys.shape[2] - start > 1,
        )  # fmt: skip
    bias = attention_mask.bias(num_queries, keys.shape[2], queries.dtype, queries.device)[..., start:]
    # torch has no fused kernel with both a mask and grouped heads.
    keys, values = (tensor[:, :, start:].repeat_interleave(groups, dim=1) for tensor in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)


def attend_unfused(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, attention_mask: AttentionMask, sinks: Tensor | None
) -> Tensor:
    """Attention in plain operations on any device, one block of queries at a time, whose scores are recomputed in the
    backward pass."""
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    bias = attention_mask.bias(
        num_queries, num_keys, torch.promote_types(queries.dtype, torch.float32), queries.device
    ).expand(-1, -1, num_queries, -1)
    if num_queries <= QUERIES_AT_ONCE:
        return _block(queries, keys, values, bias, sinks, scale)
    blocks = zip(queries.split(QUERIES_AT_ONCE, dim=2), bias.split(QUERIES_AT_ONCE, dim=2), strict=True)
    return torch.cat(
        [
            checkpoint(_block, block, keys, values, block_bias, sinks, scale,
                       use_reentrant=False, preserve_rng_state=False)
            for block, block_bias in blocks
        ],
        dim=2,
    )  # fmt: skip


def _block(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    groups = keys.shape[1]
    stacked_queries = queries.unflatten(1, (groups, -1)).flatten(2, 3)
    scores = (stacked_queries @ keys.transpose(-1, -2)).to(bias.dtype) * scale
    scores = scores.unflatten(2, (-1, queries.shape[2])).flatten(1, 2) + bias
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:1], -1, scores.shape[2], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype)
    out = shares.unflatten(1, (groups, -1)).flatten(2, 3) @ values
    return out.unflatten(2, (-1, queries.shape[2])).flatten(1, 2)


def pad_to_one_width(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad to one width with zeros, since the CPU kernel requires values as wide as keys. [1, 16, 1024, 192] with values
    of 128, forward and backward on one EPYC core: 0.58 s, against 0.88 by torch's fallback."""
    wide, short = queries.shape[-1], values.shape[-1]
    if short < wide:
        return queries, keys, functional.pad(values, (0, wide - short))
    if wide < short:
        queries, keys = (functional.pad(tensor, (0, short - wide)) for tensor in (queries, keys))
    return queries, keys, values
