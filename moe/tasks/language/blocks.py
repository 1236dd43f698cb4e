"""Decoder block: attention (grouped-query, latent or linear), then feed-forward or MoE layer, with residuals.

Between layers a tensor rank holds its sequence-parallel shard `[t, M]` of the tokens.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from moe.layers.cache import LayerCache
from moe.layers.delta_net import GatedDeltaNet
from moe.layers.feed_forward import FeedForward
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.latent import LatentAttention
from moe.layers.moe import MoELayer
from moe.layers.norm import RMSNorm
from moe.layers.sequence import PassRows
from moe.routing import TokenContext
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec

Attention = GroupedQueryAttention | LatentAttention | GatedDeltaNet


@dataclass(frozen=True)
class LanguagePass:
    """Inputs of one forward pass, for every block."""

    tokens: TokenContext
    """Token ids and padding `[G, S]`: groups of whole rows, the last possibly padded."""
    rows: PassRows


class FeedForwardBlock(nn.Module):
    """RMSNorm, then a feed-forward or MoE layer."""

    draws_by_key = True

    def __init__(self, spec: LanguageModelSpec, layer: int) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.norm_eps, one_plus=spec.norm_one_plus)
        self.moe: MoELayer | None = None
        self.dense: FeedForward | None = None
        if spec.moe is not None and layer in spec.moe_layers:
            self.moe = MoELayer(spec.moe, layer)
        else:
            self.dense = FeedForward(spec.ffn_activation)

    def forward(self, x: Tensor, run: LanguagePass) -> Tensor:
        """`x` `[t, M]` to `[t, M]`."""
        x_norm = self.norm(x)
        if self.moe is not None:
            if (y := self.moe.decode_forward(x_norm, run.tokens)) is not None:
                return y
            return self.moe(x_norm, run.tokens, run.rows.shares)[0]
        assert self.dense is not None
        return self.dense(x_norm, run.rows.shares, run.rows.draws)


class DecoderBlock(nn.Module):
    """Causal attention, then feed-forward, each with a residual."""

    draws_by_key = True

    def __init__(self, spec: LanguageModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.multiplier = layer, spec.residual_multiplier
        self.norm = RMSNorm(spec.norm_eps, one_plus=spec.norm_one_plus)
        self.attention = _attention(spec, layer)
        self.feed_forward = FeedForwardBlock(spec, layer)

    def forward(self, x: Tensor, run: LanguagePass, kept: LayerCache | None = None) -> Tensor:
        """`x` `[t, M]` to `[t, M]`; attends and appends to the KV cache `kept`, if given."""
        rows = run.rows.within(f"layer {self.layer}")
        run = LanguagePass(run.tokens, rows)
        x = x + self._scale(self.attention(self.norm(x), rows, kept))
        return x + self._scale(self.feed_forward(x, run))

    def _scale(self, y: Tensor) -> Tensor:
        return y if self.multiplier == 1 else y * self.multiplier


def _attention(spec: LanguageModelSpec, layer: int) -> Attention:
    if not spec.has_full_attention(layer):
        assert spec.linear_attention is not None
        return GatedDeltaNet(spec.linear_attention, norm_eps=spec.norm_eps)
    if isinstance(spec.attention, GroupedQueryAttentionSpec):
        return GroupedQueryAttention(
            spec.attention, layer, norm_eps=spec.norm_eps, norm_one_plus=spec.norm_one_plus
        )
    return LatentAttention(spec.attention, norm_one_plus=spec.norm_one_plus)
