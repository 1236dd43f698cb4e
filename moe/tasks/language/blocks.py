"""Blocks of a decoder-only language model, as its spec describes them."""

from moe.layers.block import Attention, FeedForwardBlock, Norm, NormPair, TransformerBlock
from moe.layers.delta_net import GatedDeltaNet
from moe.layers.feed_forward import FeedForward
from moe.layers.gated_convolution import GatedConvolution
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.latent import LatentAttention
from moe.layers.mamba2 import Mamba2
from moe.layers.moe import MoELayer
from moe.layers.norm import LayerNorm, RMSNorm
from moe.spec import LanguageModelSpec
from moe.spec.language import GatedDeltaNetSpec, GroupedQueryAttentionSpec, Mamba2Spec, ShortConvolutionSpec


def build_block(spec: LanguageModelSpec, layer: int) -> TransformerBlock:
    """Decoder block number `layer`, without values."""
    feed_forward: FeedForward | MoELayer | None = None
    if spec.moe is not None and layer in spec.moe_layers:
        feed_forward = MoELayer(spec.moe, layer, norm_eps=spec.norm_eps)
    elif spec.has_feed_forward(layer):
        feed_forward = FeedForward(spec.ffn_activation)
    return TransformerBlock(
        layer,
        _norms(spec),
        _attention(spec, layer),
        None if feed_forward is None else FeedForwardBlock(_feed_forward_norms(spec, feed_forward), feed_forward),
        residual_multiplier=spec.residual_multiplier,
    )


def build_norm(spec: LanguageModelSpec) -> Norm:
    """Norm of hidden states, without values."""
    if spec.norm_kind == "layer":
        return LayerNorm(spec.norm_eps)
    return RMSNorm(spec.norm_eps, one_plus=spec.norm_one_plus)


def _norms(spec: LanguageModelSpec) -> NormPair:
    has_norm, has_post_norm = spec.norm_placement != "post", spec.norm_placement != "pre"
    return NormPair(build_norm(spec) if has_norm else None, build_norm(spec) if has_post_norm else None)


def _feed_forward_norms(spec: LanguageModelSpec, feed_forward: FeedForward | MoELayer) -> NormPair:
    """Norms of a feed-forward or MoE layer, whose experts may have those before it."""
    has_own = isinstance(feed_forward, MoELayer) and feed_forward.spec.branch_norms
    return NormPair(None, build_norm(spec)) if has_own else _norms(spec)


def _attention(spec: LanguageModelSpec, layer: int) -> Attention | None:
    match spec.attention_of(layer):
        case None:
            return None
        case GatedDeltaNetSpec() as attention:
            return GatedDeltaNet(attention, norm_eps=spec.norm_eps)
        case Mamba2Spec() as attention:
            return Mamba2(attention, norm_eps=spec.norm_eps)
        case ShortConvolutionSpec():
            return GatedConvolution()
        case GroupedQueryAttentionSpec() as attention:
            return GroupedQueryAttention(
                attention,
                window=attention.window_of(layer),
                is_local=spec.has_local_attention(layer),
                norm_eps=spec.norm_eps,
                norm_one_plus=spec.norm_one_plus,
            )
        case attention:
            return LatentAttention(
                attention, norm_one_plus=spec.norm_one_plus, layer=layer, selecting_layer=spec.selecting_layer(layer)
            )
