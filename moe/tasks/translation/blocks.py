"""Encoder and decoder blocks: attention, then feed-forward or MoE layer, with residuals.

Between layers a tensor rank holds its sequence-parallel shard `[t, M]` of the tokens.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from moe.layers.attention import Attention, KeyValueCache
from moe.layers.draws import dropped
from moe.layers.feed_forward import FeedForward
from moe.layers.moe import MoELayer
from moe.layers.norm import LayerNorm
from moe.parallel import SequenceShard
from moe.random import Purpose
from moe.routing import TokenContext
from moe.spec import TranslationModelSpec


@dataclass(frozen=True)
class TranslationPass:
    """Inputs of one forward pass, for every block of a stack."""

    tokens: TokenContext
    """Token ids and padding `[G, S]`: groups of whole rows, the last possibly padded."""
    shares: SequenceShard
    """Sequence sharding of the rows `[B, L]`, without padding rows."""
    dropout: float

    def within(self, layer: int) -> "TranslationPass":
        """Copy that names the layer in errors of collectives."""
        return replace(self, shares=replace(self.shares, label=f"layer {layer}"))

    def drop(self, x: Tensor, layer: int, purpose: Purpose) -> Tensor:
        """Dropout on the shard `x` `[t, M]`, keyed by (seed, step, layer, purpose, token)."""
        if not self.tokens.training or self.dropout == 0:
            return x
        assert self.tokens.ids is not None
        ids = self.shares.take(self.tokens.ids.view(-1)[: self.shares.num_tokens])
        return dropped(x, self.dropout, ids, self.tokens, layer, purpose)


class TranslationFeedForwardBlock(nn.Module):
    """LayerNorm, feed-forward or MoE layer, dropout, residual."""

    draws_by_key = True

    def __init__(self, spec: TranslationModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = LayerNorm()
        self.moe: MoELayer | None = None
        self.dense: FeedForward | None = None
        if spec.moe is not None and layer in spec.moe_layers:
            self.moe = MoELayer(spec.moe, layer)
        else:
            self.dense = FeedForward()

    def forward(self, x: Tensor, run: TranslationPass) -> Tensor:
        """`x` `[t, M]` to `[t, M]`. A dropped token keeps only its residual."""
        x_norm = self.norm(x)
        if self.moe is not None:
            y, _ = self.moe(x_norm, run.tokens, run.shares)
        else:
            assert self.dense is not None
            y = self.dense(x_norm, run.shares)
        return x + run.drop(y, self.layer, Purpose.FEED_FORWARD_DROPOUT)


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward."""

    draws_by_key = True

    def __init__(self, spec: TranslationModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = LayerNorm()
        self.attention = Attention(spec.head_dim)
        self.feed_forward = TranslationFeedForwardBlock(spec, layer)

    def forward(self, x: Tensor, mask: Tensor, run: TranslationPass) -> Tensor:
        """`x` `[t, M]` to `[t, M]`; `mask` bool `[B, 1, 1, L]` is True at tokens."""
        run = run.within(self.layer)
        attention_output = self.attention(self.norm(x), run.shares, mask=mask)
        x = x + run.drop(attention_output, self.layer, Purpose.SELF_ATTENTION_DROPOUT)
        return self.feed_forward(x, run)


class TranslationDecoderBlock(nn.Module):
    """Causal self-attention, cross-attention to the source, then feed-forward."""

    entry_points = ("remember", "step")
    draws_by_key = True

    def __init__(self, spec: TranslationModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm = LayerNorm()
        self.attention = Attention(spec.head_dim)
        self.cross_norm = LayerNorm()
        self.cross_attention = Attention(spec.head_dim)
        self.feed_forward = TranslationFeedForwardBlock(spec, layer)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor, run: TranslationPass) -> Tensor:
        """`x` `[t, M]` to `[t, M]`; `memory` `[B, L, M]` is the encoder's output."""
        run = run.within(self.layer)
        attention_output = self.attention(self.norm(x), run.shares, causal=True)
        memory_cache = self.cross_attention.keys_values(memory)
        return self._rest(x, attention_output, memory_cache, memory_mask, run)

    def remember(self, memory: Tensor) -> KeyValueCache:
        """Keys and values for cross-attention, from the encoder's output `[B, L, M]`."""
        return self.cross_attention.keys_values(memory)

    def step(
        self,
        x: Tensor,
        cache: KeyValueCache,
        position: int,
        memory: KeyValueCache,
        memory_mask: Tensor,
        run: TranslationPass,
    ) -> Tensor:
        """`[t, M]` for one token per row at `position`; appends to `cache` in place."""
        run = run.within(self.layer)
        attention_output = self.attention.step(self.norm(x), run.shares, cache, position)
        return self._rest(x, attention_output, memory, memory_mask, run)

    def _rest(
        self,
        x: Tensor,
        attention_output: Tensor,
        memory: KeyValueCache,
        memory_mask: Tensor,
        run: TranslationPass,
    ) -> Tensor:
        x = x + run.drop(attention_output, self.layer, Purpose.SELF_ATTENTION_DROPOUT)
        attention_output = self.cross_attention(self.cross_norm(x), run.shares, memory, memory_mask)
        x = x + run.drop(attention_output, self.layer, Purpose.CROSS_ATTENTION_DROPOUT)
        return self.feed_forward(x, run)
