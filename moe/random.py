"""Stateless random numbers: a function of their purpose, not of where or in what order they are drawn.

Every draw hashes a 64-bit key, made of (seed, step, layer, purpose), with the token's global position, so it is the
same on any layout, under activation recomputation, and for any subset of the tokens. The 64-bit mixer is SplitMix64's
finalizer (Steele, Lea and Flood 2014); dropout uses a 32-bit mixer of two multiplications and one xor-shift, which
vectorizes.
"""

import hashlib
import math
from collections.abc import Sequence
from enum import IntEnum
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Purpose(IntEnum):
    """Purpose of a draw; different purposes are independent."""

    SECOND_EXPERT = 1
    GUMBEL = 2
    EMBEDDING_DROPOUT = 3
    SELF_ATTENTION_DROPOUT = 4
    CROSS_ATTENTION_DROPOUT = 5
    FEED_FORWARD_DROPOUT = 6
    INPUT_JITTER = 7
    GENERATION = 8
    ADAPTER_DROPOUT = 9
    HEUN_STEP = 10


def _to_int64(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def fold(*parts: SupportsIndex) -> int:
    """Hash integers of any type and size to a 64-bit key; order matters. Raises TypeError for other types."""
    key = 0
    for part in parts:
        key = (key ^ (index(part) & _MASK)) + _GOLDEN & _MASK
        key = (key ^ key >> 30) * _MIX_1 & _MASK
        key = (key ^ key >> 27) * _MIX_2 & _MASK
        key ^= key >> 31
    return key


def fold_name(seed: int, name: str) -> int:
    """Key of a named parameter's initial values."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return fold(seed, int.from_bytes(digest, "little"))


def _shift(bits: Tensor, num_bits: int) -> Tensor:
    """Logical right shift of int64; torch's shift copies the sign."""
    return (bits >> num_bits) & (_MASK >> num_bits)


def bits(key: int, counters: Tensor) -> Tensor:
    """64 random bits (int64) for each of `counters` (int64, any shape)."""
    state = counters * _to_int64(_GOLDEN) + _to_int64(key)
    state = (state ^ _shift(state, 30)) * _to_int64(_MIX_1)
    state = (state ^ _shift(state, 27)) * _to_int64(_MIX_2)
    return state ^ _shift(state, 31)


def uniform(key: int, counters: Tensor) -> Tensor:
    """Uniform float64 in [0, 1) for each of `counters` (int64, any shape)."""
    return _shift(bits(key, counters), 11).to(torch.float64) * 2.0**-53


def gumbel(key: int, ids: Tensor, num_columns: int) -> Tensor:
    """Standard Gumbel noise, float64 `[*ids.shape, num_columns]`, one row per token id."""
    columns = torch.arange(num_columns, device=ids.device)
    draws = uniform(key, bits(key, ids)[..., None] + columns)
    return -torch.log(-torch.log(draws.clamp_min(2.0**-53)))


def _words(key: int, ids: Tensor, num_columns: int, first: int = 0, count: int | None = None) -> Tensor:
    """32 random bits (int32) for each of `[*ids.shape, num_columns]`, one row per token id, or for `count` of the
    columns from `first` on."""
    rows = bits(key, ids).to(torch.int32)  # the low halves
    positions = torch.arange(first, first + (num_columns if count is None else count), device=ids.device)
    columns = bits(fold(key, num_columns), positions).to(torch.int32)
    words = rows[..., None] ^ columns
    words = words.mul_(0x7FEB352D)
    words ^= words >> 15
    return words.mul_(-0x7935_AB95)


def keep_mask(key: int, ids: Tensor, num_columns: int, keep: float, first: int = 0, count: int | None = None) -> Tensor:
    """bool `[*ids.shape, num_columns]`, True with probability `keep`, one row per token id; with `count`, only that
    many columns from `first` on."""
    return _words(key, ids, num_columns, first, count) < min(round(keep * 2.0**32 - 2.0**31), 2**31 - 1)


def jitter(x: Tensor, width: float, key: int, ids: Tensor) -> Tensor:
    """Multiply each entry of `x` `[..., M]` by a draw from Uniform(1 - width, 1 + width); `ids` int64 `[...]`."""
    draws = _words(key, ids, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
    return x * draws.mul_(width * 2.0**-31).add_(1).to(x.dtype)


def dropout(x: Tensor, probability: float, key: int, ids: Tensor) -> Tensor:
    """Zero entries of `x` `[..., M]` with `probability` and scale up the others; `ids` int64 `[...]`."""
    if probability == 0:
        return x
    keep = 1 - probability
    mask = keep_mask(key, ids, x.shape[-1], keep)
    return x * mask.to(x.dtype).mul_(1 / keep)


def init_uniform_(
    parameter: Tensor,
    std: float,
    seed: int,
    name: str,
    full_shape: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
) -> None:
    """Fill with draws from Uniform(±√3·std), keyed by (seed, name, index of the element).

    A part of a tensor of shape `full_shape` that starts at `first` gets the values of that part, so a rank draws only
    its own.
    """
    full_shape, first = full_shape or parameter.shape, first or [0] * parameter.dim()
    key, limit = fold_name(seed, name), math.sqrt(3) * std
    if not parameter.numel():
        return
    # Index of each row's first element in the whole, where rows are contiguous but their starts need not be.
    begins, stride = torch.zeros((), dtype=torch.int64, device=parameter.device), 1
    for dim in reversed(range(len(full_shape))):
        if dim < len(full_shape) - 1:
            indices = torch.arange(first[dim], first[dim] + parameter.shape[dim], device=parameter.device)
            begins = indices.view(-1, *[1] * (len(full_shape) - 1 - dim - 1)) * stride + begins
        else:
            begins = begins + first[dim]
        stride *= full_shape[dim]
    begins = begins.reshape(-1)
    rows = parameter.data.view(begins.numel(), -1)
    columns = torch.arange(rows.shape[1], device=parameter.device)
    # In blocks: all int64 counters would be twice the weights.
    rows_per_block = max(1, (1 << 20) // rows.shape[1])
    for part, starts in zip(rows.split(rows_per_block), begins.split(rows_per_block), strict=True):
        part.copy_((uniform(key, starts[:, None] + columns) * 2 - 1) * limit)
