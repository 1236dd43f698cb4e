"""SparseMixer routing (arXiv 2310.00811 and 2409.12136)."""

from collections.abc import Iterator
from typing import Literal

from moe.spec.base import NonNegative
from moe.spec.errors import Problem
from moe.spec.routers.router import BalancedSpec


class SparseMixerSpec(BalancedSpec):
    """SparseMixer: two experts sampled one after the other, with a gradient estimator for the choice (arXiv
    2409.12136), as in Phi-3.5-MoE."""

    router: Literal["sparsemixer"] = "sparsemixer"
    jitter_noise: NonNegative = 0.01
    """Experts are candidates whose logit is at most 2 · `jitter_noise` below the highest, relative to the larger of
    their own absolute value and the highest. A chosen expert's weight is its probability among the candidates."""
    training_choice: Literal["sampled", "highest"] = "sampled"
    """Choice in training. `sampled`: candidates are sampled by their probabilities, and the router learns by Heun's
    third-order estimator, as the published models were trained. `highest`: the highest logit, as in evaluation, with
    the gradient of its weight."""

    @property
    def chooses_at_random(self) -> bool:
        return self.training_choice == "sampled"

    def experts_per_token(self, num_experts: int) -> int:
        return 2

    def problems(self, num_experts: int) -> Iterator[Problem]:
        if num_experts < 2:
            yield Problem("out_of_range", "num_experts", num_experts, "must be at least 2: tokens choose two experts",
                          "raise it, or use another router")  # fmt: skip
