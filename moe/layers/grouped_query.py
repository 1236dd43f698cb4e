"""Grouped-query attention of a decoder (arXiv 2305.13245)."""

import torch
from torch import Tensor, nn

from moe.layers.cache import KVCache
from moe.layers.linear import Linear
from moe.layers.norm import RMSNorm
from moe.layers.rotary import rotate
from moe.layers.sequence import PassRows
from moe.layers.softmax_attention import attend
from moe.parallel import SequenceShard
from moe.spec.language import GroupedQueryAttentionSpec


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention of one layer. If split over tensor-parallel ranks, each has some of the heads and
    processes all tokens."""

    sinks: nn.Parameter | None
    """`[n]`: attention sinks."""

    def __init__(
        self, spec: GroupedQueryAttentionSpec, layer: int, *, norm_eps: float, norm_one_plus: bool
    ) -> None:
        super().__init__()
        self.spec, self.window = spec, spec.window_of(layer)
        self.query, self.key, self.value, self.output = Linear(), Linear(), Linear(), Linear()
        has_norm = spec.query_key_norm is not None
        self.query_norm = RMSNorm(norm_eps, one_plus=norm_one_plus) if has_norm else None
        self.key_norm = RMSNorm(norm_eps, one_plus=norm_one_plus) if has_norm else None
        self.register_parameter("sinks", None)

    def forward(self, x: Tensor, rows: PassRows, kept: KVCache | None = None) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `kept`, their keys and values are
        appended to it, and queries attend to all cached positions."""
        spec, shares = self.spec, rows.shares
        x = shares.gather_rows(x)
        queries, gate = self.query(x, rows.draws), None
        if spec.output_gate:
            queries, gate = queries.unflatten(-1, (-1, 2, spec.head_dim)).unbind(-2)
            queries, gate = queries.flatten(-2), gate.flatten(-2)
        keys, values = self.key(x, rows.draws), self.value(x, rows.draws)
        queries = self._normalize(queries, self.query_norm, spec.num_heads, shares)
        keys = self._normalize(keys, self.key_norm, spec.num_kv_heads, shares)
        if spec.clip is not None:
            queries, keys, values = (
                tensor.clamp(-spec.clip, spec.clip) for tensor in (queries, keys, values)
            )
        queries = rotate(self._heads(queries), rows.cosines, rows.sines, spec.rope.pairing)
        keys = rotate(self._heads(keys), rows.cosines, rows.sines, spec.rope.pairing)
        values = self._heads(values)
        if kept is not None:
            keys, values = kept.with_new(keys, values)
        visible = rows.seen(self.window, keys.shape[2])
        outputs = attend(queries, keys, values, scale=spec.score_scale, visible=visible, sinks=self.sinks)
        outputs = outputs.transpose(1, 2).flatten(2)
        if gate is not None:
            outputs = outputs * gate.sigmoid()
        return self.output.biased(shares.scatter_rows(self.output.product(outputs, rows.draws)))

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> KVCache:
        """Empty KV cache for `num_rows` rows of `num_positions`, on the device and in the dtype of `like`."""
        heads = self.key.weight.shape[0] // self.spec.head_dim
        shape = (num_rows, heads), self.spec.head_dim
        return KVCache.empty(num_positions, self.window, like, shape, shape)

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, heads, N, head_dim]` from `[B, N, heads · head_dim]`."""
        return x.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)

    def _normalize(self, x: Tensor, norm: RMSNorm | None, num_heads: int, shares: SequenceShard) -> Tensor:
        """Normalize `[B, N, heads · head_dim]` over each head, or over all heads of all tensor-parallel ranks."""
        if norm is None:
            return x
        if self.spec.query_key_norm == "head":
            return norm(x.unflatten(-1, (-1, self.spec.head_dim))).flatten(-2)
        if shares.group is None:
            return norm(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = shares.total(wide.square().sum(-1, keepdim=True))
        root = (squares / (num_heads * self.spec.head_dim) + norm.eps).rsqrt()
        weight = norm.weight.to(wide.dtype)
        return (wide * root * (1 + weight if norm.one_plus else weight)).to(x.dtype)
