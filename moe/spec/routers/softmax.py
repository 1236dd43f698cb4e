"""Top-k routing by softmax: Mixtral (arXiv 2401.04088), OLMoE, Qwen3 and others."""

from typing import Literal

from moe.spec.errors import Problem
from moe.spec.routers.router import GatedTopKSpec, unlearnable


class SoftmaxTopKSpec(GatedTopKSpec):
    """Top-k routing by softmax, as in Mixtral (arXiv 2401.04088), OLMoE and Qwen3."""

    router: Literal["softmax_topk"] = "softmax_topk"
    softmax: Literal["before_topk", "after_topk"] = "before_topk"
    """Softmax over all experts, or over the K chosen ones; weights then sum to `routed_scaling_factor`. A selection
    bias is added to probabilities over all experts in either case."""

    def never_trained(self) -> Problem | None:
        if self.top_k == 1 and self.softmax == "after_topk":
            return unlearnable("softmax", "after_topk", "before_topk")
        return super().never_trained()
