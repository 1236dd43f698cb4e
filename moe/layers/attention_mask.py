"""Attention masks: which positions of a sequence each position attends to."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe.overrides import overridable

PADDING = -1
"""Document number of padding."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Attention mask of the last N of L positions over all L. A position always attends to itself, and padding to
    nothing else.

    Create one per pass over a batch: its tensors are built when a layer first needs them and shared by all layers,
    including those with a different window (`within`).
    """

    causal: bool = True
    """Hide later positions."""
    window: int | None = None
    """Sliding window W: position i attends to keys i - W < j <= i."""
    chunk: int | None = None
    """Chunk C: position i attends only to keys of its chunk, ⌊j / C⌋ = ⌊i / C⌋. Positions count from 0 in each
    document, and from the first real position of a left-padded row. Resolved by `moe.layers.chunked_attention`."""
    first_key: int = 0
    """Position of the first key, if a KV cache has evicted earlier ones; for chunks of rows without padding."""
    documents: Tensor | None = None
    """int `[B, L]`: a position attends only to its own document; negative for padding."""
    first: Tensor | None = None
    """int `[B]`: first real position of each left-padded row."""
    keys: Tensor | None = None
    """bool `[B, L]`: keys that every query attends to, and no others; or `[B, N, L]`, by query. For encoders,
    cross-attention and sparse attention, without the other restrictions: queries need not be positions of the keys'
    sequence."""
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(f"window (={self.window}) must be at least 1, and requires causal attention; omit it")
        if self.chunk is not None and not (self.causal and self.window is None and self.chunk > 0):
            rule = "must be at least 1, and requires causal attention without window"
            raise ValueError(f"chunk (={self.chunk}) {rule}; omit it")
        if self.keys is not None and (self.causal or self.is_by_row):
            raise ValueError("keys require non-causal attention, without documents or padding")

    def with_window(self, window: int | None) -> "AttentionMask":
        """The same mask with this window, or with none."""
        return self if window == self.window else replace(self, window=window)

    def with_chunk(self, chunk: int | None, first_key: int = 0) -> "AttentionMask":
        """The same mask with chunks of this length, or without chunks, over keys from position `first_key` on."""
        return replace(self, chunk=chunk, first_key=first_key)

    def before(self, stop: int) -> "AttentionMask":
        """The same causal mask for rows that end before position `stop`."""
        assert self.causal
        if self.documents is None:
            return self
        documents, cache = self.documents[:, :stop], self.get_or_make(("before", stop), dict)
        return replace(self, documents=documents, _cache=cache)

    def select_rows(self, rows: Tensor) -> "AttentionMask":
        """The same mask for rows selected by int64 index."""
        documents, first, keys = (
            None if tensor is None else tensor.index_select(0, rows)
            for tensor in (self.documents, self.first, self.keys)
        )
        return replace(self, documents=documents, first=first, keys=keys, _cache={})

    def num_keys(self, num_queries: int, num_keys: int) -> int:
        """Number of keys, the last ones, that any of the last `num_queries` positions may attend to."""
        return num_keys if self.window is None else min(num_keys, num_queries + self.window - 1)

    @property
    def is_by_row(self) -> bool:
        """Whether the mask depends on positions in each row, rather than on distances only."""
        return self.documents is not None or self.first is not None

    def needs_mask(self, num_queries: int, num_keys: int) -> bool:
        """Whether attention needs a mask tensor. Full attention, one query, and causal attention with as many queries
        as keys do not, unless a window, documents or padding hide more."""
        if self.is_by_row or self.keys is not None:
            return True
        if not self.causal or num_queries == 1:
            return self.num_keys(num_queries, num_keys) < num_keys
        return num_queries < num_keys or (self.window is not None and self.window < num_keys)

    def mask(self, num_queries: int, num_keys: int, device: torch.device | str) -> Tensor:
        """bool `[B or 1, 1, N or 1, L]`, True where a query attends to a key."""
        if (visible_keys := self.keys) is not None:
            return self.get_or_make("keys", lambda: visible_keys[:, None] if visible_keys.dim() == 3
                                    else visible_keys[:, None, None])  # fmt: skip

        def make() -> Tensor:
            keys = torch.arange(num_keys, device=device)
            return self.is_visible(keys[num_keys - num_queries :, None], keys[None])

        return self.get_or_make(("mask", self.window, num_queries, num_keys, torch.device(device)), make)

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The mask as a bias on scores: 0 or -inf."""

        def make() -> Tensor:
            mask = self.mask(num_queries, num_keys, device)
            return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))

        return self.get_or_make(("bias", self.window, num_queries, num_keys, dtype, torch.device(device)), make)

    def is_visible(self, query: Tensor, key: Tensor) -> Tensor:
        """bool `[B or 1, 1, N, L]` for positions `query` `[N, 1]` and `key` `[1, L]`; without `keys` and chunks."""
        assert self.chunk is None
        mask = key <= query if self.causal else torch.ones_like(key <= query)
        if self.window is not None:
            mask = mask & (key > query - self.window)
        mask = mask[None]
        if self.documents is not None:
            query_document, key_document = self.documents[:, query], self.documents[:, key]
            mask = mask & (query_document == key_document) & (query_document >= 0)
        if self.first is not None:
            first = self.first[:, None, None]
            mask = mask & (key >= first) & (query >= first)
        return (mask | (query == key))[:, None]

    @overridable
    def get_or_make(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once per `key` and pass."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]
