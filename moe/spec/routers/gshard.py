"""GShard's top-2 gating (arXiv 2006.16668)."""

from typing import Literal

from pydantic import StrictBool

from moe.spec.base import NonNegative
from moe.spec.routers.router import AuxCoefficient, AuxiliaryLoss, CapacityFactor, MinCapacity, RouterSpec


class GShardTop2Spec(RouterSpec):
    """GShard's top-2 gating (arXiv 2006.16668, Algorithm 1)."""

    router: Literal["gshard_top2"] = "gshard_top2"
    second_expert: Literal["all", "sampling", "random"] = "random"
    """Second choice in training. `all`: the runner-up. `sampling`: sampled with Gumbel noise. `random`: the runner-up,
    kept with probability min(1, g2 / second_expert_threshold)."""
    second_expert_threshold: NonNegative = 0.5
    """0.5 is the paper's 2·g2 > rnd."""
    rejected_second_takes_slot: StrictBool = False
    """Whether a rejected second choice still takes a slot of the capacity, as in the paper's Algorithm 1."""
    normalize_gates: Literal["before_drop", "after_drop"] = "before_drop"
    capacity_factor: CapacityFactor = 2.0
    capacity_rule: Literal["released", "paper"] = "released"
    """`released`: int(S·factor/E), or 4 if 0; rounded up to a multiple of 4 if above `min_capacity`, else
    `min_capacity`. `paper`: 2S/E, rounded up."""
    min_capacity: MinCapacity = 4
    aux_coefficient: AuxCoefficient = 0.01
    aux_form: Literal["e_squared", "paper"] = "e_squared"
    """`e_squared`: mean(density · proxy) · E², 1 if uniform. `paper`: the same without E²."""

    @property
    def chooses_at_random(self) -> bool:
        return self.second_expert != "all"

    def experts_per_token(self, num_experts: int) -> int:
        return min(2, num_experts)

    def capacity(self, group_tokens: int, num_experts: int) -> int | None:
        """`released`: int(S·factor/E), or 4 if 0; rounded up to a multiple of 4 if above `min_capacity`, else
        `min_capacity` (Lingvo, gshard_layers.py). `paper`: 2S/E rounded up (section 2.2)."""
        if self.capacity_factor is None:
            return None
        if self.capacity_rule == "paper":
            return max(1, -(-2 * group_tokens // num_experts))
        automatic = int(group_tokens * self.capacity_factor / num_experts) or 4
        if self.min_capacity < automatic:
            return -(-automatic // 4) * 4
        return self.min_capacity

    def max_load(self, num_experts: int) -> float | None:
        if self.capacity_factor is None:
            return None
        return self.capacity_factor / self.experts_per_token(num_experts)  # the factor multiplies S/E, not K·S/E

    @property
    def auxiliary_loss(self) -> AuxiliaryLoss:
        return AuxiliaryLoss(self.aux_coefficient)
