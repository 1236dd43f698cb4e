"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

import torch
from torch import Tensor, nn

from moe.layers.cache import KVCache
from moe.layers.linear import Linear
from moe.layers.norm import RMSNorm
from moe.layers.sequence import PassRows
from moe.layers.softmax_attention import attend
from moe.spec.language import LatentAttentionSpec

_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer. Each tensor-parallel rank computes the latents of its own tokens, and
    has some of the heads."""

    def __init__(self, spec: LatentAttentionSpec, *, norm_one_plus: bool) -> None:
        super().__init__()
        self.spec = spec
        self.query: Linear | None = None
        self.query_down: Linear | None = None
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if spec.query_rank is None:
            self.query = Linear()
        else:
            self.query_down, self.query_up = Linear(), Linear()
            self.query_norm = RMSNorm(_LATENT_EPS, one_plus=norm_one_plus)
        self.key_value_down, self.key_value_up, self.output = Linear(), Linear(), Linear()
        self.key_value_norm = RMSNorm(_LATENT_EPS, one_plus=norm_one_plus)

    def forward(self, x: Tensor, rows: PassRows, cache: KVCache | None = None) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `cache`, their latents are appended to
        it, and queries attend to all cached positions."""
        spec, shard = self.spec, rows.shard
        queries = self._queries(x, rows)
        down = self.key_value_down(x, rows.shard_dropout_key)
        latents, rotary_keys = down.split([spec.key_value_rank, spec.rope_dim], dim=-1)
        latents = shard.gather_rows(self.key_value_norm(latents))
        rotary_keys = shard.gather_rows(rotary_keys)[:, None]
        rotary_keys = rows.rotate(rotary_keys, spec.rope.pairing)[:, 0]
        attend_to = self._attend_to_heads if cache is None or cache.is_empty else self._attend_to_latents
        if cache is not None:
            latents, rotary_keys = cache.append(latents, rotary_keys)
        outputs = attend_to(queries, latents, rotary_keys, rows)
        outputs = outputs.transpose(1, 2).flatten(2)
        return self.output.add_bias(shard.scatter_rows(self.output.product(outputs, rows.dropout_key)))

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> KVCache:
        """Empty latent cache for `num_rows` rows of `num_positions`, on the device and in the dtype of `like`."""
        shapes = ((num_rows,), self.spec.key_value_rank), ((num_rows,), self.spec.rope_dim)
        return KVCache.empty(num_positions, None, like, *shapes)

    def _queries(self, x: Tensor, rows: PassRows) -> Tensor:
        """Queries `[B, heads, N, head_dim + rope_dim]`, the last part rotated."""
        spec = self.spec
        if self.query is not None:
            queries = self.query(rows.shard.gather_rows(x), rows.dropout_key)
        else:
            assert self.query_down is not None
            assert self.query_norm is not None
            assert self.query_up is not None
            down = self.query_norm(self.query_down(x, rows.shard_dropout_key))
            queries = self.query_up(rows.shard.gather_rows(down), rows.dropout_key)
        queries = queries.unflatten(-1, (-1, spec.head_dim + spec.rope_dim)).transpose(1, 2)
        plain, rotary = queries.split([spec.head_dim, spec.rope_dim], dim=-1)
        rotary = rows.rotate(rotary, spec.rope.pairing)
        return torch.cat((plain, rotary), dim=-1)

    def _attend_to_heads(self, queries: Tensor, latents: Tensor, rotary_keys: Tensor, rows: PassRows) -> Tensor:
        """`[B, heads, N, value_dim]`, with keys and values of each head: fewest operations for as many queries as
        keys."""
        spec = self.spec
        up = self.key_value_up(latents, rows.dropout_key)
        up = up.unflatten(-1, (-1, spec.head_dim + spec.value_dim)).transpose(1, 2)
        keys, values = up.split([spec.head_dim, spec.value_dim], dim=-1)
        shared_keys = rotary_keys[:, None].expand(-1, keys.shape[1], -1, -1)
        keys = torch.cat((keys, shared_keys), dim=-1)
        return attend(queries, keys, values, scale=spec.score_scale, attention_mask=rows.attention_mask)

    def _attend_to_latents(self, queries: Tensor, latents: Tensor, rotary_keys: Tensor, rows: PassRows) -> Tensor:
        """The same with the key and value projections absorbed into the query side (section 2.1.2): all heads attend to
        the latents directly, which is cheaper for few queries."""
        spec = self.spec
        up = self.key_value_up.merged_weight(queries.dtype)
        up = up.unflatten(0, (-1, spec.head_dim + spec.value_dim))
        up_keys, up_values = up.split([spec.head_dim, spec.value_dim], dim=1)  # [heads, width, rank]
        plain, rest = queries.split([spec.head_dim, spec.rope_dim], dim=-1)
        queries = torch.cat((torch.matmul(plain, up_keys), rest), dim=-1)
        keys = torch.cat((latents, rotary_keys), dim=-1)[:, None]
        latent_outputs = attend(
            queries, keys, latents[:, None], scale=spec.score_scale, attention_mask=rows.attention_mask
        )
        return torch.matmul(latent_outputs, up_values.transpose(1, 2))
