"""Attention in chunks of a sequence (Llama 4): whole chunks are rows of their own, or documents where rows differ."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe.layers.attention_mask import PADDING, AttentionMask

Attend = Callable[..., Tensor]
"""`moe.layers.softmax_attention.attend`, for a mask without chunks."""


def attend_in_chunks(
    attend: Attend, queries: Tensor, keys: Tensor, values: Tensor, *, attention_mask: AttentionMask, **options: Any
) -> Tensor:
    """`attend` with a mask that has chunks, in the shapes of `attend`.

    Without documents and padding, the keys of other chunks are not read: chunks become rows, and need no mask.
    """
    if attention_mask.is_by_row:
        mask = chunks_as_documents(attention_mask, keys.shape[2], keys.device)
        return attend(queries, keys, values, attention_mask=mask, **options)
    chunk, mask = attention_mask.chunk, attention_mask.with_chunk(None)
    assert chunk is not None
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    stop = attention_mask.first_key + num_keys  # position after the last one
    first_query = stop - num_queries
    outputs = []
    start = first_query
    while start < stop:
        num_chunks = 1 if start % chunk else max(1, (stop - start) // chunk)
        end = min(stop, (start // chunk + num_chunks) * chunk)
        query_slice = slice(start - first_query, end - first_query)
        first_key = max(0, start - start % chunk - attention_mask.first_key)
        key_slice = slice(first_key, end - attention_mask.first_key)
        parts = queries[:, :, query_slice], keys[:, :, key_slice], values[:, :, key_slice]
        part_outputs = attend(*(_as_rows(part, num_chunks) for part in parts), attention_mask=mask, **options)
        outputs.append(_as_positions(part_outputs, num_chunks))
        start = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _as_rows(x: Tensor, num_chunks: int) -> Tensor:
    """`[B · chunks, heads, C, d]` from `[B, heads, chunks · C, d]`."""
    return x if num_chunks == 1 else x.unflatten(2, (num_chunks, -1)).transpose(1, 2).flatten(0, 1)


def _as_positions(x: Tensor, num_chunks: int) -> Tensor:
    """`[B, heads, chunks · C, d]` from `[B · chunks, heads, C, d]`."""
    return x if num_chunks == 1 else x.unflatten(0, (-1, num_chunks)).transpose(1, 2).flatten(2, 3)


def chunks_as_documents(attention_mask: AttentionMask, num_keys: int, device: torch.device) -> AttentionMask:
    """Mask that is equal for `num_keys` keys, with the chunks of each row as its documents, no longer than a window."""
    chunk = attention_mask.chunk
    assert chunk is not None

    def make() -> AttentionMask:
        documents = _chunk_numbers(attention_mask, chunk, num_keys, device)
        return AttentionMask(window=chunk, documents=documents)

    key = "chunks as documents", chunk, attention_mask.first_key, num_keys, device
    mask: AttentionMask = attention_mask.get_or_make(key, make)
    return mask


def _chunk_numbers(attention_mask: AttentionMask, chunk: int, num_keys: int, device: torch.device) -> Tensor:
    """int64 `[B, L]`: number of each position's chunk in its row, `PADDING` for padding."""
    places = torch.arange(num_keys, device=device)[None]
    documents, first = attention_mask.documents, attention_mask.first
    if documents is None:
        assert first is not None
        return (places - first[:, None]).div(chunk, rounding_mode="floor").clamp(min=PADDING)
    is_first = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    starts = torch.where(is_first, places, 0).cummax(dim=1).values
    numbers = ((places - starts) % chunk == 0).cumsum(dim=1)
    return numbers.masked_fill(documents < 0, PADDING)
