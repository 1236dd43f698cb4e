"""Grouped-query self- and cross-attention (arXiv 2305.13245); multi-head attention is a special case."""

import torch
from torch import Tensor, nn

from moe.layers.cache import KeysValues, KVCache
from moe.layers.context_attention import attend_over_context
from moe.layers.linear import Linear, linear, operand
from moe.layers.norm import RMSNorm, UnscaledRMSNorm
from moe.layers.sequence import PassRows
from moe.overrides import overridable
from moe.parallel import SequenceShard, deferred_gradients
from moe.spec.language import GroupedQueryAttentionSpec

QKNorm = RMSNorm | UnscaledRMSNorm


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention of one layer. If split over tensor-parallel ranks, each rank has some of the heads and
    processes all tokens."""

    key_value: nn.Parameter | None
    """`[2, m · head_dim, M]`: projections of keys and values as one parameter."""
    sinks: nn.Parameter | None
    """`[n]`: attention sinks."""

    def __init__(
        self,
        spec: GroupedQueryAttentionSpec,
        *,
        window: int | None = None,
        is_local: bool = False,
        norm_eps: float = 1e-6,
        norm_one_plus: bool = False,
        fused_key_value: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.window, self.is_local = spec, window, is_local
        self.query = Linear()
        self.key = None if fused_key_value else Linear()
        self.value = None if fused_key_value or spec.keys_as_values else Linear()
        self.output = Linear()
        self.query_norm, self.key_norm = (_norm(spec, norm_eps, one_plus=norm_one_plus) for _ in range(2))
        self.value_norm = UnscaledRMSNorm(norm_eps) if spec.value_norm else None
        for name in ("key_value", "sinks"):
            self.register_parameter(name, None)

    def forward(
        self, x: Tensor, rows: PassRows, cache: KVCache | None = None, memory: KeysValues | None = None
    ) -> Tensor:
        """Return `[t, M]` for this rank's share `x` `[t, M]` of the rows. With `cache`, their keys and values are
        appended to it, and queries attend to all cached positions. With `memory` they attend to its keys and values
        instead, as `rows.memory_mask` allows: cross-attention."""
        spec, shard = self.spec, rows.shard
        x = shard.gather_rows(x)
        queries, gate = self.query(x, rows.dropout_key), None
        if spec.output_gate:
            queries, gate = queries.unflatten(-1, (-1, 2, spec.head_dim)).unbind(-2)
            queries, gate = queries.flatten(-2), gate.flatten(-2)
        queries = self._normed_heads(queries, self.query_norm, spec.num_heads, rows)
        queries = rows.scale_queries(queries, spec.query_scaling)
        keys, values = self.keys_values(x, rows) if memory is None else memory
        if cache is not None:
            keys, values = cache.append(keys, values)
        context, attention_mask = None, rows.memory_mask
        if memory is None:
            context, num_keys = rows.context, rows.num_positions if cache is None else keys.shape[2]
            attention_mask = rows.layer_mask(self.window, num_keys, in_chunks=spec.window_kind == "chunk")
        assert attention_mask is not None, "cross-attention needs the encoder's mask"
        outputs = attend_over_context(
            queries, keys, values,
            context=context, scale=spec.score_scale, attention_mask=attention_mask, sinks=self.sinks,
        )  # fmt: skip
        outputs = outputs.transpose(1, 2).flatten(2)
        if gate is not None:
            outputs = outputs * gate.sigmoid()
        return self.output.add_bias(shard.scatter_rows(self.output.product(outputs, rows.dropout_key)))

    def keys_values(self, x: Tensor, rows: PassRows) -> KeysValues:
        """Keys `[B, m, L, head_dim]` and values `[B, m, L, value_head_dim]` of `x` `[B, L, M]`: the rows, or the
        encoder's output."""
        spec = self.spec
        if self.key_value is not None:
            keys, values = project_keys_values(x, operand(self.key_value, x.dtype))
        else:
            assert self.key is not None
            keys = self.key(x, rows.dropout_key)
            values = keys if self.value is None else self.value(x, rows.dropout_key)
        keys = self._normed_heads(keys, self.key_norm, spec.num_kv_heads, rows)
        if spec.clip is not None:
            values = values.clamp(-spec.clip, spec.clip)
        if spec.value_multiplier != 1:
            values = values * spec.value_multiplier
        values = values.unflatten(-1, (-1, spec.value_head_dim))
        values = values if self.value_norm is None else self.value_norm(values)
        return keys, values.transpose(1, 2)

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> KVCache:
        """Empty KV cache for `num_rows` rows of `num_positions`, on the device and in the dtype of `like`."""
        if self.key is not None:
            width = self.key.weight.shape[0]
        else:
            assert self.key_value is not None
            width = self.key_value.shape[1]
        leading = num_rows, width // self.spec.head_dim
        shapes = (leading, self.spec.head_dim), (leading, self.spec.value_head_dim)
        return KVCache.empty(num_positions, self.window, like, *shapes)

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, heads, N, head_dim]` from `[B, N, heads · head_dim]`."""
        return x.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)

    def _normed_heads(self, x: Tensor, norm: QKNorm | None, num_heads: int, rows: PassRows) -> Tensor:
        """Heads `[B, heads, N, head_dim]` of queries or keys `[B, N, heads · head_dim]`, normalized, clipped and
        rotated."""
        spec = self.spec
        if not spec.norm_after_rope:
            x = self._normalize(x, norm, num_heads, rows.shard)
        if spec.clip is not None:
            x = x.clamp(-spec.clip, spec.clip)
        heads = rows.rotate(self._heads(x), spec.rope.pairing, is_local=self.is_local)
        return norm(heads) if spec.norm_after_rope and norm is not None else heads

    def _normalize(self, x: Tensor, norm: QKNorm | None, num_heads: int, shard: SequenceShard) -> Tensor:
        """Normalize `[B, N, heads · head_dim]` over each head, or over all heads of all tensor-parallel ranks."""
        if norm is None:
            return x
        if self.spec.has_norm_per_head or not isinstance(norm, RMSNorm):
            return norm(x.unflatten(-1, (-1, self.spec.head_dim))).flatten(-2)
        if shard.group is None:
            return norm(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = shard.total(wide.square().sum(-1, keepdim=True))
        root = (squares / (num_heads * self.spec.head_dim) + norm.eps).rsqrt()
        weight = norm.weight.to(wide.dtype)
        return (wide * root * (1 + weight if norm.one_plus else weight)).to(x.dtype)


def _norm(spec: GroupedQueryAttentionSpec, eps: float, *, one_plus: bool) -> QKNorm | None:
    """QK norm of queries or of keys, if there is one."""
    if spec.query_key_norm is None:
        return None
    return UnscaledRMSNorm(eps) if spec.query_key_norm == "unscaled" else RMSNorm(eps, one_plus=one_plus)


@overridable
def project_keys_values(memory: Tensor, weight: Tensor) -> KeysValues:
    """Keys and values `[B, L, heads · head_dim]` of `memory` `[B, L, M]`, by `weight` `[2, heads · head_dim, M]`."""
    weight = weight.flatten(0, 1) if deferred_gradients(weight) is None else weight
    keys, values = linear(memory, weight).chunk(2, dim=-1)
    return keys, values
