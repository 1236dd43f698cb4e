"""Blocks of a language model: attention is grouped-query, latent or linear, as its spec says."""

from moe.layers.block import Attention, FeedForwardBlock, TransformerBlock
from moe.layers.delta_net import GatedDeltaNet
from moe.layers.feed_forward import FeedForward
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.latent import LatentAttention
from moe.layers.moe import MoELayer
from moe.layers.norm import RMSNorm
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec


def build_block(spec: LanguageModelSpec, layer: int) -> TransformerBlock:
    """Decoder block number `layer`, without values."""
    feed_forward: FeedForward | MoELayer
    if spec.moe is not None and layer in spec.moe_layers:
        feed_forward = MoELayer(spec.moe, layer)
    else:
        feed_forward = FeedForward(spec.ffn_activation)
    return TransformerBlock(
        layer,
        build_norm(spec),
        _attention(spec, layer),
        FeedForwardBlock(build_norm(spec), feed_forward),
        residual_multiplier=spec.residual_multiplier,
    )


def build_norm(spec: LanguageModelSpec) -> RMSNorm:
    """RMS norm of hidden states, without values."""
    return RMSNorm(spec.norm_eps, one_plus=spec.norm_one_plus)


def _attention(spec: LanguageModelSpec, layer: int) -> Attention:
    if not spec.has_full_attention(layer):
        assert spec.linear_attention is not None
        return GatedDeltaNet(spec.linear_attention, norm_eps=spec.norm_eps)
    if isinstance(spec.attention, GroupedQueryAttentionSpec):
        return GroupedQueryAttention(
            spec.attention,
            window=spec.attention.window_of(layer),
            norm_eps=spec.norm_eps,
            norm_one_plus=spec.norm_one_plus,
        )
    return LatentAttention(spec.attention, norm_one_plus=spec.norm_one_plus)
