"""Which positions of a sequence each of its positions may look at."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe.sharding.hints.annotate import is_capturing

PADDING = -1
"""The document of a position that is in none."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Visibility of all L positions to the last N of them. A position always sees itself, and padding nothing else.

    One is made for each pass over a batch: masks are made once, when the first layer asks, and shared by all layers,
    those of other windows (`within`) too.
    """

    causal: bool = True
    """No position sees a later one."""
    window: int | None = None
    """W: position i sees the keys i - W < j <= i."""
    documents: Tensor | None = None
    """int `[B, L]`: a position sees its own document alone; negative is padding."""
    first: Tensor | None = None
    """int `[B]`: the first real position of each row, before which is padding, where prompts are aligned at their
    ends."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(
                f"window (={self.window}) must be at least 1, and needs causal attention; leave it out"
            )

    def within(self, window: int | None) -> "AttentionMask":
        """The same of a layer with this window, or with none."""
        return self if window == self.window else replace(self, window=window)

    def num_keys(self, num_queries: int, num_keys: int) -> int:
        """How many keys, the last ones, any of the last `num_queries` positions may see."""
        return num_keys if self.window is None else min(num_keys, num_queries + self.window - 1)

    @property
    def is_by_row(self) -> bool:
        """Whether what is seen depends on where a position lies in its row, rather than on distances alone."""
        return self.documents is not None or self.first is not None

    def needs_mask(self, num_queries: int, num_keys: int) -> bool:
        """Whether more is hidden than what is later than a query, or that with fewer queries than keys."""
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
        """The same to be added to scores: 0 or -inf."""

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
        """Result of `make` from when this key was first asked for in this pass."""
        if is_capturing():  # a captured program would remember nothing
            return make()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
