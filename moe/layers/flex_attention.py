"""Attention with masks and sinks on a GPU, by torch's flex attention, compiled for each mask. No backward pass on a
CPU."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from moe.layers.attention_mask import AttentionMask
from moe.layers.mask_blocks import Block, BlockKind, MaskBlocks


def flex_attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    attention_mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """`moe.layers.softmax_attention.attend` by flex attention, which skips blocks of 128 keys that no query of a block
    sees.

    The forward pass is tested on a CPU; both passes were compared with CPU attention on an H200, in float32 to a
    hundredth (`tests/gpu/test_sequence_layers.py`).
    """
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    mask = _block_mask(attention_mask, num_queries, num_keys, queries.device)
    out, sums = _flex_attention(queries.device.type)(
        queries, keys, values, scale=scale, block_mask=mask,
        enable_gqa=queries.shape[1] != keys.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return out
    # exp(z) / (exp(z) + exp(c)): what the sink leaves of each softmax. The kernel differentiates z too.
    return (out * torch.sigmoid(sums.lse - sinks.to(sums.lse.dtype)[:, None])[..., None]).to(out.dtype)


def flex_attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, *, scale: float, block: Block, mask: MaskBlocks
) -> tuple[Tensor, Tensor]:
    """(outputs `[B, n, N, dv]`, log-sum-exp `[B, n, N]`) of one block of a mask."""
    out, sums = _flex_attention(queries.device.type)(
        queries, keys, values, scale=scale, block_mask=_mask_of_block(mask, block, queries.device),
        enable_gqa=queries.shape[1] != keys.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, sums.lse


@cache
def _flex_attention(device_type: str) -> Any:
    # CPUs are used only in tests: uncompiled, to save the compile time.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)


def _block_mask(attention_mask: AttentionMask, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Mask of the last `num_queries` of `num_keys` positions."""
    first_query = num_keys - num_queries
    key = "flex", attention_mask.window, num_queries, num_keys, device
    return attention_mask.get_or_make(
        key, lambda: _mask_of_positions(attention_mask, first_query, num_queries, 0, num_keys, device)
    )


def _mask_of_block(mask: MaskBlocks, block: Block, device: torch.device) -> BlockMask | None:
    if block.kind is BlockKind.FULL:
        return None
    queries, keys = block.query_positions, block.key_positions

    def make() -> BlockMask:
        return _mask_of_positions(mask.attention_mask, queries.start, len(queries), keys.start, len(keys), device)

    return mask.attention_mask.get_or_make(("flex", mask.attention_mask.window, queries, keys, device), make)


def _mask_of_positions(
    attention_mask: AttentionMask,
    first_query: int,
    num_queries: int,
    first_key: int,
    num_keys: int,
    device: torch.device,
) -> BlockMask:
    """Mask of consecutive query positions over consecutive key positions."""
    causal, window, documents, first, visible_keys = (
        attention_mask.causal,
        attention_mask.window,
        attention_mask.documents,
        attention_mask.first,
        attention_mask.keys,
    )

    num_rows = next((len(tensor) for tensor in (documents, first, visible_keys) if tensor is not None), None)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query, key = query + first_query, key + first_key
        if num_rows == 1:  # one mask of all rows, whose numbers the kernel passes nevertheless
            row = row * 0
        if visible_keys is not None:
            return visible_keys[row, key]
        mask = key <= query if causal else key == key
        if window is not None:
            mask = mask & (key > query - window)
        if documents is not None:
            mask = mask & (documents[row, query] == documents[row, key]) & (documents[row, query] >= 0)
        if first is not None:
            mask = mask & (key >= first[row]) & (query >= first[row])
        return mask | (query == key)

    return create_block_mask(sees, num_rows, None, num_queries, num_keys, device=device)
