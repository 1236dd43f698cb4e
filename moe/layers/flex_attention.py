"""Attention with masks and sinks on a GPU, by torch's flex attention, compiled for each mask. No backward pass on a
CPU."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from moe.layers.attention_mask import AttentionMask


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
    mask = _block_mask(attention_mask, queries.shape[0], num_queries, num_keys, queries.device)
    out, sums = _flex_attention(queries.device.type)(
        queries, keys, values, scale=scale, block_mask=mask,
        enable_gqa=queries.shape[1] != keys.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return out
    # exp(z) / (exp(z) + exp(c)): what the sink leaves of each softmax. The kernel differentiates z too.
    return (out * torch.sigmoid(sums.lse - sinks.to(sums.lse.dtype)[:, None])[..., None]).to(out.dtype)


@cache
def _flex_attention(device_type: str) -> Any:
    # CPUs are used only in tests: uncompiled, to save the compile time.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)


def _block_mask(
    attention_mask: AttentionMask, num_rows: int, num_queries: int, num_keys: int, device: torch.device
) -> BlockMask:
    offset = num_keys - num_queries
    causal, window, documents, first = (
        attention_mask.causal,
        attention_mask.window,
        attention_mask.documents,
        attention_mask.first,
    )

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + offset
        mask = key <= query if causal else key == key
        if window is not None:
            mask = mask & (key > query - window)
        if documents is not None:
            mask = mask & (documents[row, query] == documents[row, key]) & (documents[row, query] >= 0)
        if first is not None:
            mask = mask & (key >= first[row]) & (query >= first[row])
        return mask | (query == key)

    return attention_mask.get_or_make(
        ("blocks", window, num_queries, num_keys, device),
        lambda: create_block_mask(
            sees, num_rows if attention_mask.is_by_row else None, None, num_queries, num_keys, device=device
        ),
    )
