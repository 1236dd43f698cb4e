"""Expert computation: weights, feed-forward pass, activations, and one file per backend of grouped products."""

from moe.experts.activation import Activation, build_activation
from moe.experts.experts import BACKENDS, Cost, Costs, Experts, LocalExperts, cheapest
from moe.experts.feed_forward import (
    ExpertComputation,
    ExpertWeights,
    LocalComputation,
    feed_forward,
    feed_forward_reference,
)
from moe.experts.measurement import measure, stored_or_measured
from moe.experts.products import GroupedProducts

__all__ = [
    "BACKENDS", "Activation", "Cost", "Costs", "ExpertComputation", "ExpertWeights", "Experts", "GroupedProducts",
    "LocalComputation", "LocalExperts", "build_activation", "cheapest", "feed_forward", "feed_forward_reference",
    "measure", "stored_or_measured",
]  # fmt: skip
