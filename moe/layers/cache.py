"""KV cache and linear-attention state of one layer, for decoding token by token."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LayerCache(ABC):
    """Cache of one layer for rows `[B]`, changed in place."""

    @abstractmethod
    def take_rows(self, rows: Tensor, *, same_sources: bool = False) -> None:
        """Keep only these rows, in this order (int64 indices, which may repeat). `same_sources`: each row is replaced
        by one that decodes the same source, such as another beam of it."""


class KVCache(LayerCache):
    """KV cache: preallocated tensors `[B, ..., positions, width]`, keys and values or latents and rotary keys.

    A sliding window evicts the oldest positions. Capacity for twice the window suffices: when it is full, the last
    window is moved to the front.
    """

    def __init__(self, tensors: tuple[Tensor, ...], window: int | None) -> None:
        self._tensors, self._window, self._length = tensors, window, 0

    @classmethod
    def empty(
        cls, num_positions: int, window: int | None, like: Tensor, *shapes: tuple[tuple[int, ...], int]
    ) -> "KVCache":
        """Allocate capacity for `num_positions` of tensors `[*leading, positions, width]`, given as (leading, width),
        on the device and in the dtype of `like`."""
        capacity = num_positions if window is None else min(num_positions, 2 * window)
        return cls(tuple(like.new_empty(*leading, capacity, width) for leading, width in shapes), window)

    @property
    def is_empty(self) -> bool:
        return self._length == 0

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Append `new` `[..., N, width]`, with the same N for all tensors, and return all positions that N queries may
        attend to."""
        num_new, capacity = new[0].shape[-2], self._tensors[0].shape[-2]
        if self._length + num_new > capacity:
            return self._append_and_evict(*new)
        for tensor, new_tensor in zip(self._tensors, new, strict=True):
            tensor[..., self._length : self._length + num_new, :] = new_tensor
        self._length += num_new
        return tuple(tensor[..., : self._length, :] for tensor in self._tensors)

    def _append_and_evict(self, *new: Tensor) -> tuple[Tensor, ...]:
        assert self._window is not None, "more positions than there is room for"
        old = [tensor[..., max(0, self._length - self._window) : self._length, :] for tensor in self._tensors]
        full_tensors = tuple(torch.cat(pair, -2) for pair in zip(old, new, strict=True))
        self._length = min(self._window, full_tensors[0].shape[-2])
        for tensor, full_tensor in zip(self._tensors, full_tensors, strict=True):
            tensor[..., : self._length, :] = full_tensor[..., full_tensor.shape[-2] - self._length :, :]
        return full_tensors

    def take_rows(self, rows: Tensor, *, same_sources: bool = False) -> None:
        tensors = []
        for tensor in self._tensors:
            selected = tensor.new_empty(len(rows), *tensor.shape[1:])
            prefix = (..., slice(0, self._length), slice(None))
            selected[prefix] = tensor[prefix].index_select(0, rows)
            tensors.append(selected)
        self._tensors = tuple(tensors)


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of heads, `[B, m, L, d]` each."""


class EncoderDecoderCache(LayerCache):
    """KV caches of a decoder layer with cross-attention: of its own positions, and of the encoder's."""

    def __init__(self, self_attention_cache: KVCache) -> None:
        self.self_attention_cache = self_attention_cache
        self.memory: KeysValues | None = None
        """None before the first token."""

    def take_rows(self, rows: Tensor, *, same_sources: bool = False) -> None:
        self.self_attention_cache.take_rows(rows)
        if self.memory is not None and not same_sources:
            keys, values = (tensor.index_select(0, rows) for tensor in self.memory)
            self.memory = keys, values


class RecurrentState(LayerCache):
    """State of linear attention and last inputs of its convolution; None before the first token, or if a layer has
    none. Empty for layers without attention."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        """`[B, heads, key_dim, value_dim]`"""
        self.inputs: Tensor | None = None
        """`[B, conv_tokens - 1, channels]`"""

    def take_rows(self, rows: Tensor, *, same_sources: bool = False) -> None:
        self.state = None if self.state is None else self.state.index_select(0, rows)
        self.inputs = None if self.inputs is None else self.inputs.index_select(0, rows)
