"""Blocks of a translation model: encoder blocks attend to all real positions, decoder blocks also to the encoder."""

from moe.layers.block import Block, FeedForwardBlock
from moe.layers.feed_forward import FeedForward
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.moe import MoELayer
from moe.layers.norm import LayerNorm
from moe.spec import TranslationModelSpec


def build_block(spec: TranslationModelSpec, layer: int) -> Block:
    """Block number `layer` of both stacks, the encoder's first, without values."""
    feed_forward: FeedForward | MoELayer
    if spec.moe is not None and layer in spec.moe_layers:
        feed_forward = MoELayer(spec.moe, layer)
    else:
        feed_forward = FeedForward()
    decodes = layer >= spec.num_encoder_layers
    return Block(
        layer,
        LayerNorm(),
        _attention(spec),
        FeedForwardBlock(LayerNorm(), feed_forward),
        cross_norm=LayerNorm() if decodes else None,
        cross_attention=_attention(spec) if decodes else None,
    )


def _attention(spec: TranslationModelSpec) -> GroupedQueryAttention:
    return GroupedQueryAttention(spec.attention, fused_key_value=True)
