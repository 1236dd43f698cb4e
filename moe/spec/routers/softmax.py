"""Top-k routing by softmax: Mixtral (arXiv 2401.04088), OLMoE, Qwen3 and their kin."""

from typing import Literal

from moe.spec.errors import Problem
from moe.spec.routers.router import GatedTopKSpec, unlearnable


class SoftmaxTopKSpec(GatedTopKSpec):
    """Mixtral, arXiv 2401.04088, and its kin."""

    router: Literal["softmax_topk"] = "softmax_topk"
    softmax: Literal["before_topk", "after_topk"] = "before_topk"
    """Over all experts, or over the K chosen ones only (then the weights add up to 1 in any case, but for
    `routed_scaling_factor`). A bias is added to probabilities over all experts either way."""

    def never_trained(self) -> Problem | None:
        if self.top_k == 1 and self.softmax == "after_topk":
            return unlearnable("softmax", "after_topk", "before_topk")
        return super().never_trained()
