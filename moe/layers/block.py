"""Transformer block: attention, cross-attention in decoders that have an encoder, then feed-forward or MoE layer.

Between layers a tensor rank holds its sequence-parallel shard `[t, M]` of the tokens.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from moe.layers.cache import EncoderDecoderCache, KeysValues, KVCache, LayerCache, RecurrentState
from moe.layers.delta_net import GatedDeltaNet
from moe.layers.feed_forward import FeedForward
from moe.layers.gated_convolution import GatedConvolution
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.latent import LatentAttention
from moe.layers.mamba2 import Mamba2
from moe.layers.moe import MoELayer
from moe.layers.norm import LayerNorm, RMSNorm
from moe.layers.sequence import SequencePass
from moe.random import Purpose

Attention = GroupedQueryAttention | LatentAttention | GatedDeltaNet | GatedConvolution | Mamba2
Norm = LayerNorm | RMSNorm


@dataclass(frozen=True)
class NormPair:
    """Norms before and after an attention, feed-forward or MoE layer; at least one."""

    before: Norm | None
    after: Norm | None = None


class FeedForwardBlock(nn.Module):
    """Feed-forward or MoE layer, with norms before or after it."""

    draws_by_key = True

    def __init__(self, norms: NormPair, layer: FeedForward | MoELayer) -> None:
        super().__init__()
        self.norm, self.post_norm = norms.before, norms.after
        self.moe = layer if isinstance(layer, MoELayer) else None
        self.dense = layer if isinstance(layer, FeedForward) else None

    def forward(self, x: Tensor, run: SequencePass) -> Tensor:
        """`x` `[t, M]` to `[t, M]`."""
        y = self._forward(x if self.norm is None else self.norm(x), run)
        return y if self.post_norm is None else self.post_norm(y)

    def _forward(self, x: Tensor, run: SequencePass) -> Tensor:
        if self.moe is not None:
            if (y := self.moe.decode_forward(x, run.tokens)) is not None:
                return y
            return self.moe(x, run.tokens, run.rows.shard)[0]
        assert self.dense is not None
        return self.dense(x, run.rows.shard, run.rows.dropout_key)


class TransformerBlock(nn.Module):
    """Causal or full self-attention, cross-attention if it has one, and feed-forward, each with norms and a
    residual; or only attention or only feed-forward. A token that an MoE layer drops keeps only its residual."""

    draws_by_key = True
    scalar: nn.Parameter | None
    """`[1]`: factor of the layer's output."""

    def __init__(
        self,
        layer: int,
        norms: NormPair,
        attention: Attention | None,
        feed_forward: FeedForwardBlock | None,
        *,
        cross_norm: Norm | None = None,
        cross_attention: GroupedQueryAttention | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.layer, self.multiplier = layer, residual_multiplier
        self.norm, self.post_norm = (None, None) if attention is None else (norms.before, norms.after)
        self.attention = attention
        self.cross_norm, self.cross_attention = cross_norm, cross_attention
        self.feed_forward = feed_forward
        self.register_parameter("scalar", None)

    def forward(
        self, x: Tensor, run: SequencePass, cache: LayerCache | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """`x` `[t, M]` to `[t, M]`; attends and appends to `cache`, if given. `memory` `[B, L, M]` is the encoder's
        output, for cross-attention; a cache needs it once."""
        run = run.for_layer(self.layer)
        self_attention_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        if self.attention is not None:
            y = self.attention(x if self.norm is None else self.norm(x), run.rows, self_attention_cache)
            y = y if self.post_norm is None else self.post_norm(y)
            x = x + self._scale(run.drop(y, self.layer, Purpose.SELF_ATTENTION_DROPOUT))
        if self.cross_attention is not None:
            assert self.cross_norm is not None
            keys_values = self._keys_values(self.cross_attention, run, cache, memory)
            y = self.cross_attention(self.cross_norm(x), run.rows, memory=keys_values)
            x = x + self._scale(run.drop(y, self.layer, Purpose.CROSS_ATTENTION_DROPOUT))
        if self.feed_forward is not None:
            y = self.feed_forward(x, run)
            x = x + self._scale(run.drop(y, self.layer, Purpose.FEED_FORWARD_DROPOUT))
        return x if self.scalar is None else x * self.scalar.to(x.dtype)

    def new_cache(self, num_rows: int, num_positions: int, like: Tensor) -> LayerCache:
        """Empty cache for `num_rows` rows of `num_positions`, on the device and in the dtype of `like`."""
        if self.attention is None:
            return RecurrentState()
        self_attention_cache = self.attention.new_cache(num_rows, num_positions, like)
        if self.cross_attention is None:
            return self_attention_cache
        assert isinstance(self_attention_cache, KVCache)
        return EncoderDecoderCache(self_attention_cache)

    def _keys_values(
        self, cross_attention: GroupedQueryAttention, run: SequencePass, cache: LayerCache | None, memory: Tensor | None
    ) -> KeysValues:
        """Keys and values of the encoder's output, from the cache if it has them."""
        if isinstance(cache, EncoderDecoderCache) and cache.memory is not None:
            return cache.memory
        assert memory is not None, "cross-attention needs the encoder's output"
        assert run.rows.rotary is None, "the encoder's positions are not those of the rows"
        keys_values = cross_attention.keys_values(memory, run.rows)
        if isinstance(cache, EncoderDecoderCache):
            cache.memory = keys_values
        return keys_values

    def _scale(self, y: Tensor) -> Tensor:
        return y if self.multiplier == 1 else y * self.multiplier
