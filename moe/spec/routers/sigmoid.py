"""DeepSeek-V3's routing (arXiv 2412.19437, section 2.1.2)."""

from collections.abc import Iterator
from typing import Literal

from moe.spec.base import Count, NonNegative, Positive
from moe.spec.errors import Problem
from moe.spec.routers.router import AuxCoefficient, GatedTopKSpec


class SigmoidTopKSpec(GatedTopKSpec):
    """DeepSeek-V3, arXiv 2412.19437."""

    router: Literal["sigmoid_topk"] = "sigmoid_topk"
    num_expert_groups: Count = 1
    """Experts in order form this many groups, to limit how many nodes a token visits."""
    expert_groups_per_token: Count = 1
    """Only the experts of this many groups, those with the highest sums of their two best scores, stand for
    choice."""
    routed_scaling_factor: Positive = 1.0
    """Multiplies the weights."""
    aux_coefficient: AuxCoefficient = 0.0
    bias_update_rate: NonNegative = 0.001
    """By how much an expert's bias, which counts for the choice and not for the weight, rises after a step that left
    it below the mean load, and falls after one above it (arXiv 2408.15664, Algorithm 1). 0 keeps no bias."""

    @property
    def bias_rate(self) -> float:
        return self.bias_update_rate

    @property
    def max_expert_groups(self) -> int | None:
        return self.expert_groups_per_token if self.num_expert_groups > 1 else None

    def problems(self, num_experts: int) -> Iterator[Problem]:
        groups, per_token = self.num_expert_groups, self.expert_groups_per_token
        yield from super().problems(num_experts)
        if num_experts % groups:
            yield Problem("num_expert_groups", groups, f"must divide num_experts (={num_experts})",
                          "use a divisor of it")  # fmt: skip
        elif per_token > groups:
            yield Problem("expert_groups_per_token", per_token, f"must be at most num_expert_groups (={groups})",
                          "lower it")  # fmt: skip
        elif self.top_k > (standing := per_token * (num_experts // groups)):
            yield Problem("top_k", self.top_k,
                          f"must be at most the {standing} experts of expert_groups_per_token (={per_token}) groups",
                          "lower it, or raise expert_groups_per_token")  # fmt: skip
