"""The specification of one mixture-of-experts layer."""

from typing import Literal

from pydantic import Field, StrictBool

from moe.spec.base import Count, CountOrZero, NonNegative, Spec


class MoESpec(Spec):
    """A mixture-of-experts layer with GShard's top-2 gating (arXiv 2006.16668, section 2.2).

    The defaults are the authors' released code; where the paper differs there is a switch.
    """

    router: Literal["gshard_top2"] = "gshard_top2"
    num_experts: Count = Field(le=1_000_000)
    model_dim: Count
    """M, the width of a token."""
    hidden_dim: Count
    """H, the hidden width of one expert."""
    capacity_factor: NonNegative = 2.0
    """Multiplies S/E: the buffer of one expert in one group of S tokens."""
    capacity_rule: Literal["released", "paper"] = "released"
    """`released`: int(S·factor/E), 4 where that is 0, rounded up to a multiple of 4; `min_capacity` where that is
    not below it. `paper`: 2S/E."""
    min_capacity: CountOrZero = 4
    second_expert: Literal["all", "sampling", "random"] = "random"
    """`all`: always the runner-up. `sampling`: drawn with Gumbel noise. `random`: the runner-up, kept with
    probability min(1, g2 / second_expert_threshold)."""
    second_expert_threshold: NonNegative = 0.5
    """0.5 is the paper's 2·g2 > rnd."""
    rejected_second_takes_slot: StrictBool = False
    """True is the paper's Algorithm 1: the running count advances for a rejected second choice too."""
    aux_form: Literal["e_squared", "paper"] = "e_squared"
    """`e_squared`: mean(density · proxy) · E², 1 when uniform. `paper`: that divided by E²."""
    aux_coefficient: NonNegative = 0.01
    normalize_gates: Literal["before_drop", "after_drop"] = "before_drop"
    group_tokens: Count = 1024
    """Positions of the batch that form one group. Groups are routed independently of one another, so this is
    a property of the data and never of the layout."""

    @property
    def experts_per_token(self) -> int:
        """K: two, or one where there is only one expert."""
        return min(2, self.num_experts)
