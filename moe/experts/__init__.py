"""Expert computation: weights, activations, and one file per backend of grouped products."""

from moe.experts.activation import Activation, build_activation
from moe.experts.choice import BACKENDS, Costs, cheapest, measure, stored_or_measured
from moe.experts.experts import Experts, LocalExperts
from moe.experts.feed_forward import Work, feed_forward, feed_forward_reference
from moe.experts.products import GroupedProducts
from moe.experts.weights import ExpertWeights

__all__ = [
    "BACKENDS",
    "Activation",
    "Costs",
    "ExpertWeights",
    "Experts",
    "GroupedProducts",
    "LocalExperts",
    "Work",
    "build_activation",
    "cheapest",
    "feed_forward",
    "feed_forward_reference",
    "measure",
    "stored_or_measured",
]
