"""Attention, norm, position, feed-forward and the mixture-of-experts layer."""

from moe.layers.moe import MoELayer
from moe.routing.tokens import TokenContext

__all__ = ["MoELayer", "TokenContext"]
