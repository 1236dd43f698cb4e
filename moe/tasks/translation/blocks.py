"""The blocks of the two stacks: attention, then a feed-forward layer or experts, each in a residual.

Between layers a tensor rank has its share of the tokens, `[t, M]`; where there is one, that is all of them.
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
    """Facts of one forward pass that every block of a stack needs."""

    tokens: TokenContext
    """Ids and padding `[G, S]`: the rows are the groups, the last perhaps filled up."""
    shares: SequenceShard
    """Of the rows `[B, L]` that are really there."""
    dropout: float

    def within(self, layer: int) -> "TranslationPass":
        """The same, with that layer's number in what a failed collective says."""
        return replace(self, shares=replace(self.shares, label=f"layer {layer}"))

    def drop(self, x: Tensor, layer: int, purpose: Purpose) -> Tensor:
        """Dropout keyed by (seed, step, layer, purpose, token) on the share `x` `[t, M]`."""
        if not self.tokens.training or self.dropout == 0:
            return x
        assert self.tokens.ids is not None
        ids = self.shares.take(self.tokens.ids.view(-1)[: self.shares.num_tokens])
        return dropped(x, self.dropout, ids, self.tokens, layer, purpose)


class TranslationFeedForwardBlock(nn.Module):
    """Norm, a feed-forward layer or experts, dropout, residual."""

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
        """`[t, M]` for `x` `[t, M]`. A token that no expert kept is carried on by the residual alone."""
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
        """`[t, M]` for `x` `[t, M]`; `mask` bool `[B, 1, 1, L]`, True where there is a token."""
        run = run.within(self.layer)
        attention_output = self.attention(self.norm(x), run.shares, mask=mask)
        x = x + run.drop(attention_output, self.layer, Purpose.SELF_ATTENTION_DROPOUT)
        return self.feed_forward(x, run)


class TranslationDecoderBlock(nn.Module):
    """Causal self-attention, attention to the source, then feed-forward."""

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
        """`[t, M]` for `x` `[t, M]`, looking at itself up to each position and at all of the source, whose states are
        `memory` `[B, L, M]`."""
        run = run.within(self.layer)
        attention_output = self.attention(self.norm(x), run.shares, causal=True)
        memory_cache = self.cross_attention.keys_values(memory)
        return self._rest(x, attention_output, memory_cache, memory_mask, run)

    def remember(self, memory: Tensor) -> KeyValueCache:
        """Keys and values that attention to the source needs, from its states `[B, L, M]`."""
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
        """`[t, M]` for the tokens at `position`, a row each, whose keys and values join `cache` in place."""
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
