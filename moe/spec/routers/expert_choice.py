"""Expert choice (arXiv 2202.09368)."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Literal

from moe.spec.errors import Problem
from moe.spec.routers.router import CapacityFactor, RouterSpec


class ExpertChoiceSpec(RouterSpec):
    """Experts choose tokens (expert choice, arXiv 2202.09368)."""

    router: Literal["expert_choice"] = "expert_choice"
    capacity_factor: CapacityFactor = 2.0
    later_tokens_choose_too: Literal["no", "accepted"] = "no"
    """Expert choice compares all tokens of a token group, so in a causal model later tokens affect earlier ones.
    `accepted` allows training such a model."""

    @property
    def factor(self) -> float:
        """Mean number of experts per token."""
        assert self.capacity_factor is not None
        return self.capacity_factor

    def experts_per_token(self, num_experts: int) -> int:
        return max(1, min(num_experts, round(self.factor)))

    def capacity(self, group_tokens: int, num_experts: int) -> int:
        """S·factor/E rounded up, at most S (arXiv 2202.09368, eq. 1)."""
        return min(group_tokens, ceil(group_tokens * Fraction(str(self.factor)) / num_experts))

    def max_load(self, num_experts: int) -> float:
        return self.factor / self.experts_per_token(num_experts)

    def problems(self, num_experts: int) -> Iterator[Problem]:
        if self.capacity_factor is None:
            yield Problem("wrong_type", "capacity_factor", None, "must be a number for expert choice",
                          "set the mean number of experts per token")  # fmt: skip

    def not_causal(self) -> Problem | None:
        if self.later_tokens_choose_too == "accepted":
            return None
        return Problem("unsupported", "router", self.router,
                       "lets later tokens influence the experts of earlier ones, but this model's decoder is causal",
                       "use another router, or set moe.later_tokens_choose_too: accepted")  # fmt: skip
