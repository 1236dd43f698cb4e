"""The arithmetic of experts."""

from moe.experts.experts import Experts
from moe.experts.feed_forward import feed_forward_reference, grouped_feed_forward

__all__ = ["Experts", "feed_forward_reference", "grouped_feed_forward"]
