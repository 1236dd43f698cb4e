"""Base class of router specs, and shared fields."""

from abc import abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, StrictBool

from moe.spec.base import Count, CountOrZero, NonNegative, Positive, Spec
from moe.spec.errors import Problem

Scope = Literal["group", "sequence", "global_batch"]

CapacityFactor = Annotated[
    NonNegative | None,
    Field(
        description="Scales K·S/E (`gshard_top2` and `expert_choice`: S/E), the rows per expert and group "
        "of S tokens. None: dropless. `expert_choice` requires a number: the mean number of "
        "experts per token."
    ),
]
MinCapacity = Annotated[CountOrZero, Field(description="Minimum capacity of an expert.")]
AuxCoefficient = Annotated[NonNegative, Field(description="Weight of the load-balancing loss.")]
TopK = Annotated[Count, Field(description="K, experts per token.")]
BiasUpdateRate = Annotated[
    NonNegative,
    Field(
        description="Step of the selection bias, which affects the choice but not the weight: raised for "
        "experts below the mean load, lowered above it (arXiv 2408.15664, Algorithm 1). 0 "
        "keeps a `selection_bias` fixed."
    ),
]


class AuxiliaryLoss(NamedTuple):
    """Weight of the load-balancing loss, and its scope."""

    coefficient: float = 0.0
    scope: Scope = "group"


class RouterSpec(Spec):
    """Fields and properties of a router, with defaults."""

    router: str

    @abstractmethod
    def experts_per_token(self, num_experts: int) -> int:
        """K: experts that a token chooses; with expert choice, the average."""

    def capacity(self, group_tokens: int, num_experts: int) -> int | None:
        """C: rows of an expert's buffer for a token group of S = `group_tokens` positions, including padding. None is
        dropless."""
        return None

    def max_load(self, num_experts: int) -> float | None:
        """Bound, set by the capacity, on the busiest expert's rows relative to the mean; None if dropless."""
        return None

    @property
    def auxiliary_loss(self) -> AuxiliaryLoss:
        return AuxiliaryLoss()

    @property
    def keeps_load(self) -> bool:
        """Whether a step needs the loads of the previous step."""
        return self.auxiliary_loss.scope == "global_batch"

    @property
    def bias_rate(self) -> float:
        """Update rate of the selection bias; 0 keeps it constant."""
        return 0.0

    @property
    def has_selection_bias(self) -> bool:
        """Whether experts have a bias that affects the choice but not the weight."""
        return self.bias_rate > 0

    @property
    def chooses_at_random(self) -> bool:
        """Whether choices in training depend on draws."""
        return False

    @property
    def max_expert_groups(self) -> int | None:
        """Maximum number of expert groups among a token's experts; None without groups."""
        return None

    @property
    def resolved(self) -> Self:
        """The router with unset fields written out."""
        return self

    def problems(self, num_experts: int) -> Iterator[Problem]:
        """Conflicts among its fields, and with the number of experts."""
        yield from ()

    def never_trained(self) -> Problem | None:
        """Problem of a field that prevents the router from learning: a choice whose weight is always 1 has no gradient.

        None if it learns, or has nothing to learn. Not an error in itself: some published models have such routers,
        trained in other ways.
        """
        return None

    def not_causal(self) -> Problem | None:
        """Problem if later tokens affect the experts of earlier ones, unless accepted."""
        return None


class TokenChoiceSpec(RouterSpec):
    """Router in which tokens choose experts, within the experts' capacity."""

    capacity_factor: CapacityFactor = None
    min_capacity: MinCapacity = 1
    drop_by: Literal["position", "probability"] = "position"
    """Choices that a full expert drops: the last ones (first choices come before second ones, then tokens in order), or
    those with the lowest weights."""

    def capacity(self, group_tokens: int, num_experts: int) -> int | None:
        """K·S·factor/E rounded up, at least `min_capacity` (arXiv 2101.03961, eq. 3)."""
        if self.capacity_factor is None:
            return None
        share = (
            group_tokens * Fraction(str(self.capacity_factor)) / num_experts
        )  # exact: in floats, 1.1 · 100 exceeds 110
        return max(1, self.min_capacity, ceil(self.experts_per_token(num_experts) * share))

    def max_load(self, num_experts: int) -> float | None:
        return self.capacity_factor


class BalancedSpec(TokenChoiceSpec):
    """Token choice with an auxiliary loss."""

    aux_coefficient: AuxCoefficient = 0.01
    aux_scope: Scope = "group"
    """Tokens over which load is balanced. `global_batch` multiplies probabilities by the previous step's loads, so that
    balance does not depend on ranks or micro-batches."""

    @property
    def auxiliary_loss(self) -> AuxiliaryLoss:
        return AuxiliaryLoss(self.aux_coefficient, self.aux_scope)


class GatedTopKSpec(BalancedSpec):
    """Top-k router with optional selection bias, expert groups and renormalization."""

    top_k: TopK = 2
    renormalize_gates: StrictBool | None = None
    """Whether a token's K weights are divided by their sum. Default: if K > 1."""
    num_expert_groups: Count = 1
    """Groups of consecutive experts, to limit how many nodes a token is sent to."""
    expert_groups_per_token: Count = 1
    """Group-limited routing: a token's experts come from this many groups, ranked by their highest score under softmax
    (DeepSeek-V2), or the sum of their two highest under sigmoid (DeepSeek-V3)."""
    routed_scaling_factor: Positive = 1.0
    """Factor of the weights."""
    bias_update_rate: BiasUpdateRate = 0.0
    selection_bias: StrictBool | None = None
    """Whether experts have a bias that affects choices but not weights. Default: if `bias_update_rate` > 0. True with a
    rate of 0 keeps the loaded bias."""

    def experts_per_token(self, num_experts: int) -> int:
        return self.top_k

    @property
    def renormalizes(self) -> bool:
        """`renormalize_gates`, by default K > 1: a single renormalized weight would always be 1."""
        return self.top_k > 1 if self.renormalize_gates is None else self.renormalize_gates

    @property
    def bias_rate(self) -> float:
        return self.bias_update_rate

    @property
    def has_selection_bias(self) -> bool:
        return self.bias_rate > 0 if self.selection_bias is None else self.selection_bias

    @property
    def max_expert_groups(self) -> int | None:
        return self.expert_groups_per_token if self.num_expert_groups > 1 else None

    @property
    def resolved(self) -> Self:
        # None unless the field is needed, so that digests of plans from before it existed still match.
        selection_bias = True if self.has_selection_bias and self.bias_rate == 0 else None
        return self.model_copy(update={"renormalize_gates": self.renormalizes, "selection_bias": selection_bias})

    def problems(self, num_experts: int) -> Iterator[Problem]:
        yield from too_many_choices(self.top_k, num_experts)
        groups, per_token = self.num_expert_groups, self.expert_groups_per_token
        if num_experts % groups:
            yield Problem("not_divisible", "num_expert_groups", groups, f"must divide num_experts (={num_experts})",
                          "use one of its divisors")  # fmt: skip
        elif per_token > groups:
            yield Problem("out_of_range", "expert_groups_per_token", per_token,
                          f"must be at most num_expert_groups (={groups})", "lower it")  # fmt: skip
        elif self.top_k > (limit := per_token * (num_experts // groups)) and self.top_k <= num_experts:
            yield Problem("out_of_range", "top_k", self.top_k,
                          f"must be at most the {limit} experts of expert_groups_per_token (={per_token}) groups",
                          "lower it, or raise expert_groups_per_token")  # fmt: skip
        if self.selection_bias is False and self.bias_update_rate:
            yield Problem(
                "conflict",
                "selection_bias",
                False,
                (f"must not be false with a bias that follows the loads (bias_update_rate={self.bias_update_rate})"),
                "omit it, or use a bias_update_rate of 0",
            )

    def never_trained(self) -> Problem | None:
        if self.top_k == 1 and self.renormalizes:
            return unlearnable("renormalize_gates", True, "false")
        return None


def unlearnable(field: str, value: object, instead: str) -> Problem:
    """Problem of a field value with which a top-1 router does not learn."""
    return Problem(
        "out_of_range",
        field,
        value,
        "gives a token's only expert (top_k is 1) the same weight regardless of its score, so the router never learns",
        f"use {instead}, or a top_k of 2 or more",
    )


def too_many_choices(top_k: int, num_experts: int) -> Iterator[Problem]:
    if top_k > num_experts:
        yield Problem("out_of_range", "top_k", top_k, f"must be at most num_experts (={num_experts})", "lower it")
