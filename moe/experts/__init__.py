"""Expert computation: weights, feed-forward pass, activations, and one file per backend of grouped products."""

from moe.experts.activation import Activation, build_activation
from moe.experts.experts import BACKENDS, FUSED, Cost, Costs, Experts, LocalExperts, cheapest
from moe.experts.feed_forward import ExpertComputation, LocalComputation, feed_forward, feed_forward_reference
from moe.experts.measurement import measure, stored_or_measured
from moe.experts.products import GroupedProducts, SegmentProducts
from moe.experts.weights import ExpertWeights

__all__ = [
    "BACKENDS", "FUSED", "Activation", "Cost", "Costs", "ExpertComputation", "ExpertWeights", "Experts",
    "GroupedProducts", "LocalComputation", "LocalExperts", "SegmentProducts", "build_activation", "cheapest",
    "feed_forward", "feed_forward_reference", "measure", "stored_or_measured",
]  # fmt: skip
