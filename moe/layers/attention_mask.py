"""Masks of attention: which positions of a sequence each of its positions may attend to."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe.sharding.hints.annotate import is_capturing

PADDING = -1
"""The document number of padding."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Visibility of all L positions to the last N of them. A position always sees itself, and padding sees nothing
    else. An instance is made for each pass over a batch; its mask tensors are made when the first layer asks for them,
    and are shared by all layers, including those with other windows (`within`)."""

    causal: bool = True
    """Whether no position sees a later one."""
    window: int | None = None
    """W: position i sees the keys i - W < j <= i."""
    documents: Tensor | None = None
    """int `[B, L]`: document numbers; a position sees its own document alone. Negative numbers are padding."""
    first: Tensor | None = None
    """int `[B]`: the first real position of each row, for prompts aligned at their ends; positions before it are
    padding."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(
                f"window (={self.window}) must be at least 1, and needs causal attention; leave it out"
            )

    def within(self, window: int | None) -> "AttentionMask":
        """The mask for a layer with this window, or without one."""
        return self if window == self.window else replace(self, window=window)

    def num_keys(self, num_queries: int, num_keys: int) -> int:
        """How many of the last keys may be seen by any of the last `num_queries` positions."""
        return num_keys if self.window is None else min(num_keys, num_queries + self.window - 1)

    @property
    def is_by_row(self) -> bool:
        """Whether visibility depends on the position in the row, rather than on distances alone."""
        return self.documents is not None or self.first is not None

    def needs_mask(self, num_queries: int, num_keys: int) -> bool:
        """Whether more is hidden than the positions later than a query, or whether later positions are hidden and there
        are fewer queries than keys."""
        if self.is_by_row:
            return True
        if not self.causal or num_queries == 1:
            return self.num_keys(num_queries, num_keys) < num_keys
        return num_queries < num_keys or (self.window is not None and self.window < num_keys)

    def mask(self, num_queries: int, num_keys: int, device: torch.device | str) -> Tensor:
        """bool `[B or 1, 1, N, L]`, True where a query sees a key."""

        def make() -> Tensor:
            keys = torch.arange(num_keys, device=device)
            return self._sees(keys[num_keys - num_queries :, None], keys[None])

        return self.once(("mask", self.window, num_queries, num_keys, torch.device(device)), make)

    def bias(self, num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The mask as a bias to be added to scores: 0 or -inf."""

        def make() -> Tensor:
            mask = self.mask(num_queries, num_keys, device)
            return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))

        return self.once(("bias", self.window, num_queries, num_keys, dtype, torch.device(device)), make)

    def _sees(self, query: Tensor, key: Tensor) -> Tensor:
        """bool `[B or 1, 1, N, L]` for positions `query` `[N, 1]` and `key` `[1, L]`."""
        mask = key <= query if self.causal else torch.ones_like(key <= query)
        if self.window is not None:
            mask = mask & (key > query - self.window)
        mask = mask[None]
        if self.documents is not None:
            of_query, of_key = self.documents[:, query], self.documents[:, key]
            mask = mask & (of_query == of_key) & (of_query >= 0)
        if self.first is not None:
            first = self.first[:, None, None]
            mask = mask & (key >= first) & (query >= first)
        return (mask | (query == key))[:, None]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called when this key is first asked for in this pass."""
        if is_capturing():  # a captured program would remember nothing
            return make()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
