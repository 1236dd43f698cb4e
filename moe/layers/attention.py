"""Multi-head self- and cross-attention, with a KV cache for decoding token by token."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from moe.layers.linear import Linear, linear
from moe.overrides import overridable
from moe.parallel import SequenceShard, narrowed


@dataclass
class KeyValueCache:
    """KV cache of a sequence, `[B, heads, length, head_dim]` each."""

    keys: Tensor
    values: Tensor

    def empty(self, num_positions: int) -> "KeyValueCache":
        """Empty cache for the same rows and heads and `num_positions` positions."""
        rows, heads, _, width = self.keys.shape
        shape = (rows, heads, num_positions, width)
        return KeyValueCache(self.keys.new_empty(shape), self.values.new_empty(shape))

    def keep_rows(self, rows: Tensor) -> "KeyValueCache":
        return KeyValueCache(self.keys.index_select(0, rows), self.values.index_select(0, rows))


class Attention(nn.Module):
    """Scaled dot-product attention (arXiv 1706.03762, section 3.2), without bias or dropout on probabilities. If split
    over tensor-parallel ranks, each has some of the heads and processes all tokens."""

    key_value: nn.Parameter
    """`[2, heads · head_dim, M]`"""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = Linear()
        self.register_parameter("key_value", None)
        self.output = Linear()

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, heads, L, head_dim]` from `[B, L, heads · head_dim]`."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, memory: Tensor) -> KeyValueCache:
        """Keys and values of `memory` `[B, L, M]`."""
        keys, values = project_keys_values(memory, narrowed(self.key_value, memory.dtype))
        return KeyValueCache(self._heads(keys), self._heads(values))

    def forward(
        self,
        x: Tensor,
        shares: SequenceShard,
        memory: KeyValueCache | None = None,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Return `[t, M]`: positions of `x` `[t, M]` attend to `memory`, or to their own row if it is None.

        `x` is this rank's share of the tokens `[B, N]` of `shares`. `mask` bool, broadcastable to
        `[B, heads, N, length]`, is True where a position may attend; with `causal`, position i attends to memory up to
        i.
        """
        x = shares.gather_rows(x)
        memory = self.keys_values(x) if memory is None else memory
        return shares.scatter_rows(self._attend(x, memory, mask, causal=causal))

    def step(self, x: Tensor, shares: SequenceShard, cache: KeyValueCache, position: int) -> Tensor:
        """Return `[t, M]`: the tokens at `position`, one per row, attend to all positions up to it. Writes their keys
        and values to `cache`."""
        x = shares.gather_rows(x)
        new = self.keys_values(x)
        cache.keys[:, :, position] = new.keys[:, :, 0]
        cache.values[:, :, position] = new.values[:, :, 0]
        so_far = KeyValueCache(cache.keys[:, :, : position + 1], cache.values[:, :, : position + 1])
        return shares.scatter_rows(self._attend(x, so_far))

    def _attend(
        self, x: Tensor, memory: KeyValueCache, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        """`[B, N, M]`: output of this rank's heads for `x` `[B, N, M]`."""
        outputs = functional.scaled_dot_product_attention(
            self._heads(self.query(x)), memory.keys, memory.values, attn_mask=mask, is_causal=causal
        )
        return self.output(outputs.transpose(1, 2).flatten(2))


@overridable
def project_keys_values(memory: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, L, heads · head_dim]` of `memory` `[B, L, M]`, by `weight` `[2, heads · head_dim, M]`."""
    keys, values = linear(memory, weight.flatten(0, 1)).chunk(2, dim=-1)
    return keys, values
