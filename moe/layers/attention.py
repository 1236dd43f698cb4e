"""Multi-head attention of a sequence to itself or to another, with a cache for decoding token by token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers.linear import Linear
from moe.parallel import Layout, narrowed, new_parameter


@dataclass
class KeyValueCache:
    """Keys and values of a sequence, `[B, heads, length, head_dim]` each."""

    keys: Tensor
    values: Tensor

    def keep_rows(self, rows: Tensor) -> "KeyValueCache":
        return KeyValueCache(self.keys.index_select(0, rows), self.values.index_select(0, rows))


class Attention(nn.Module):
    """Scaled dot-product attention (arXiv 1706.03762, section 3.2), without bias or dropout on probabilities. Where it
    is split over tensor ranks, each has some of the heads."""

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        head_dim: int,
        layout: Layout,
        *,
        name: str,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads // layout.degree("tensor"), head_dim
        inner = num_heads * head_dim
        settings: dict[str, Any] = {"seed": seed, "dtype": dtype}
        self.query = Linear(model_dim, inner, layout, name=f"{name}.query", cuts={"tensor": 0}, **settings)
        self.key_value = new_parameter(
            (2, inner, model_dim), model_dim**-0.5, layout,
            name=f"{name}.key_value.weight", cuts={"tensor": 1}, **settings,
        )  # fmt: skip
        self.output = Linear(inner, model_dim, layout, name=f"{name}.output", cuts={"tensor": 1}, **settings)

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, heads, L, head_dim]` from `[B, L, heads · head_dim]`."""
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def keys_values(self, memory: Tensor) -> KeyValueCache:
        """Keys and values of `memory` `[B, L, M]`."""
        weight = narrowed(self.key_value, memory.dtype).flatten(0, 1)
        keys, values = functional.linear(memory, weight).chunk(2, dim=-1)
        return KeyValueCache(self._heads(keys), self._heads(values))

    def forward(
        self, x: Tensor, memory: KeyValueCache, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """`[B, N, M]`: each position of `x` `[B, N, M]` attends to `memory`. What the tensor ranks give adds up.

        `mask` bool, broadcastable to `[B, heads, N, length]`, True where it may look; `causal` lets position i
        look at memory up to i.
        """
        attended = functional.scaled_dot_product_attention(
            self._heads(self.query(x)), memory.keys, memory.values, attn_mask=mask, is_causal=causal
        )
        return self.output(attended.transpose(1, 2).flatten(2))
