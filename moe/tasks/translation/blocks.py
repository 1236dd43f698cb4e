"""Blocks of a translation model: encoder blocks attend to all real positions, decoder blocks also to the encoder."""

from moe.layers.block import FeedForwardBlock, TransformerBlock
from moe.layers.feed_forward import FeedForward
from moe.layers.grouped_query import GroupedQueryAttention
from moe.layers.moe import MoELayer
from moe.layers.norm import LayerNorm
from moe.spec import TranslationModelSpec
from moe.spec.language import GroupedQueryAttentionSpec


def build_blocks(spec: TranslationModelSpec) -> tuple[list[TransformerBlock], list[TransformerBlock]]:
    """(encoder blocks, decoder blocks), numbered through both stacks, without values."""
    attention = spec.attention  # one object: blocks that share it are recognised as repeated
    blocks = [_block(spec, attention, layer) for layer in range(spec.num_layers)]
    return blocks[: spec.num_encoder_layers], blocks[spec.num_encoder_layers :]


def _block(spec: TranslationModelSpec, attention: GroupedQueryAttentionSpec, layer: int) -> TransformerBlock:
    feed_forward: FeedForward | MoELayer
    if spec.moe is not None and layer in spec.moe_layers:
        feed_forward = MoELayer(spec.moe, layer)
    else:
        feed_forward = FeedForward()
    decodes = layer >= spec.num_encoder_layers
    return TransformerBlock(
        layer,
        LayerNorm(),
        GroupedQueryAttention(attention, fused_key_value=True),
        FeedForwardBlock(LayerNorm(), feed_forward),
        cross_norm=LayerNorm() if decodes else None,
        cross_attention=GroupedQueryAttention(attention, fused_key_value=True) if decodes else None,
    )
