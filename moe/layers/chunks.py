"""Chunks of a sequence under a state that decays: padding, documents, and recomputation in the backward pass.

Shapes: B rows, L positions, c heads of keys and queries, h heads of values (h a multiple of c), dk and dv their widths.
In a chunk function, r = h / c, and a row is K chunks of C positions.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moe.spec.language.chunks import CHUNK, POSITIONS_AT_ONCE

CHUNKS_AT_ONCE = POSITIONS_AT_ONCE // CHUNK
"""Chunks that are in memory together; others are recomputed in the backward pass."""


class ChunkFunction(Protocol):
    """Function of some chunks."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, /, *others: Any) -> tuple[Tensor, Tensor]:
        """Return (outputs `[B, c, r, K, C, dv]`, final state `[B, c, r, dk, dv]`). `others` are further inputs, the
        initial state `[B, c, r, dk, dv]`, and the two results of `_segments_of_part`."""
        ...


def scan_chunks(
    function: ChunkFunction, inputs: Sequence[Tensor], state: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (outputs `[B, L, h, dv]`, final state `[B, h, dk, dv]`) of `function`, chunk after chunk.

    `inputs` are q and k `[B, L, c, dk]`, v `[B, L, h, dv]`, log decays `[B, L, h, 1]`, and others of their shapes;
    `state` is the initial one. The backward pass recomputes from the state before every 16th chunk. `documents` int
    `[B, L]`: the state is reset between documents, so a row's first document continues from `state`.
    """
    q, _, v, *_ = inputs
    (rows, num_positions, key_heads, _), heads = q.shape, v.shape[2]
    length = min(CHUNK, max(1, num_positions))
    missing = -num_positions % length

    def chunks(x: Tensor) -> Tensor:
        """`[B, c, r or 1, K, C, d]` from `[B, L, c or h, d]`."""
        x = functional.pad(x, (0, 0, 0, 0, 0, missing))
        return x.unflatten(2, (key_heads, -1)).unflatten(1, (-1, length)).permute(0, 3, 4, 1, 2, 5)

    chunked_inputs = [chunks(tensor) for tensor in inputs]
    num_chunks = chunked_inputs[0].shape[3]
    by_chunk = None
    if documents is not None:
        segments = document_starts(documents).cumsum(dim=1)
        if missing:
            segments = torch.cat((segments, segments[:, -1:].expand(-1, missing)), dim=1)
        by_chunk = segments.unflatten(1, (-1, length))
    state = state.unflatten(1, (key_heads, -1))
    outputs = []
    for start in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunk_slice = slice(start, start + CHUNKS_AT_ONCE)
        arguments: list[Any] = [
            *(tensor[:, :, :, chunk_slice] for tensor in chunked_inputs),
            state,
            *_segments_of_part(by_chunk, chunk_slice),
        ]
        if torch.is_grad_enabled() and num_chunks > 1:
            out, state = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = function(*arguments)
        outputs.append(out)
    out = torch.cat(outputs, dim=3).permute(0, 3, 4, 1, 2, 5)
    out = out.reshape(rows, num_positions + missing, heads, v.shape[-1])
    return out[:, :num_positions], state.flatten(1, 2)


def document_starts(documents: Tensor) -> Tensor:
    """bool `[B, L]`: real positions whose previous real position in the row is in another document."""
    is_real = documents >= 0
    positions = torch.arange(documents.shape[1], device=documents.device)
    last = torch.where(is_real, positions, -1).cummax(dim=1).values
    last = functional.pad(last, (1, 0), value=-1)[:, :-1]
    return is_real & (last >= 0) & (documents.gather(1, last.clamp(min=0)) != documents)


def _segments_of_part(by_chunk: Tensor | None, chunk_slice: slice) -> tuple[Tensor | None, Tensor | None]:
    """(segment in which each chunk begins, int64 `[B, 1, 1, K, 1]`; segment of each position, `[B, 1, 1, K, C]`)."""
    if by_chunk is None:
        return None, None
    last = functional.pad(by_chunk[:, :, -1], (1, 0))[:, :-1]  # a row begins in segment 0
    return last[:, None, None, chunk_slice, None], by_chunk[:, None, None, chunk_slice]


def chunk_decays(
    log_decay: Tensor, initial_segments: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Decays within chunks: (from each position to each later one `[B, c, r, K, C, C]`, from a chunk's start to each
    position, from each position to the chunk's end, `[B, c, r, K, C, 1]` each); 0 between documents."""
    length, wide = log_decay.shape[-2], log_decay.dtype
    # In float64, since a weak decay between strong ones is a small difference of large sums.
    decay_sum = log_decay[..., 0].double().cumsum(dim=-1)
    mask = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril()
    since_start = decay_sum
    if initial_segments is not None and segments is not None:
        mask = mask & (segments[..., None] == segments[..., None, :])
        since_start = decay_sum.masked_fill(segments != initial_segments, float("-inf"))
    # Masked before the exponential: later positions and other documents would overflow, and -inf has a gradient of 0.
    pair_decay = (decay_sum[..., None] - decay_sum[..., None, :]).to(wide).masked_fill(~mask, float("-inf")).exp()
    return pair_decay, since_start.to(wide).exp()[..., None], pair_decay[..., -1, :, None]


def first_state(q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """The initial state `[B, h, dk, dv]`, zeros by default, in at least float32. Raises ValueError if the heads of `q`
    do not divide those of `v`."""
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"v ({v.shape[2]} heads) must have a multiple of the {q.shape[2]} heads of q and k")
    wide = torch.promote_types(v.dtype, torch.float32)
    if state is not None:
        return state.to(wide)
    return v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=wide)
