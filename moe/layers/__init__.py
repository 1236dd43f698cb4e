"""Attention, normalization, positions, feed-forward and mixture-of-experts layers."""

from moe.layers.moe import MoELayer
from moe.routing.router import TokenContext

__all__ = ["MoELayer", "TokenContext"]
