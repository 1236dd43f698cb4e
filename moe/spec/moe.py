"""The specification of one mixture-of-experts layer."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, StrictBool, model_serializer, model_validator

from moe.spec.base import Count, CountOrZero, Fraction, NonNegative, Positive, Spec
from moe.spec.errors import Problem, SpecError
from moe.spec.parameter import Parameter, Size, matrix, within
from moe.spec.routers import FIELDS, OWN_DEFAULTS, RouterName, foreign_fields, owners


class MoESpec(Spec):
    """A mixture-of-experts layer: which router sends tokens to which experts, and what the experts are.

    Some fields belong to some routers only (`moe.spec.routers`); given to another one they are refused.
    """

    router: RouterName = "gshard_top2"
    """`gshard_top2`: arXiv 2006.16668, Algorithm 1. `switch_top1`: arXiv 2101.03961. `softmax_topk`: Mixtral,
    arXiv 2401.04088, and its kin. `sigmoid_topk`: DeepSeek-V3, arXiv 2412.19437. `sinkhorn_topk`: balanced
    assignment, as BASE, arXiv 2103.16716, and Megatron-LM have it. `expert_choice`: arXiv 2202.09368."""
    num_experts: Count = Field(le=1_000_000)
    model_dim: Count
    """M, the width of a token."""
    hidden_dim: Count
    """H, the hidden width of one expert."""
    activation: Literal["relu", "gelu", "swiglu", "geglu"] = "relu"
    """Of experts. `relu` and `gelu` stand between two matrices; `swiglu` and `geglu` (arXiv 2002.05202) have a third,
    the gate's."""
    expert_bias: StrictBool = False
    """Whether each matrix of a routed expert has a bias."""
    shared_hidden_dim: Count | None = None
    """Hidden width of what every token passes through beside its experts: of all shared experts together (DeepSeekMoE,
    arXiv 2401.06066). None has none."""
    shared_gate: StrictBool = False
    """Whether the shared experts' output is weighted by a sigmoid of the token (Qwen2-MoE, arXiv 2407.10671)."""
    group_tokens: Count = 1024
    """Positions of the batch that form one group. Groups are routed independently of one another, so this is
    a property of the data and never of the layout."""
    top_k: Count = 2
    """K, the experts that a token chooses."""

    # Scores and weights
    softmax: Literal["before_topk", "after_topk"] = "before_topk"
    """Over all experts, or over the K chosen ones only (then the weights add up to 1 in any case)."""
    renormalize_gates: StrictBool | None = None
    """Whether the weights of a token's K choices are divided by their sum; where left out, if K is more than 1."""
    num_expert_groups: Count = 1
    """Experts in order form this many groups, to limit how many nodes a token visits."""
    expert_groups_per_token: Count = 1
    """Only the experts of this many groups, those with the highest sums of their two best scores, stand for
    choice."""
    routed_scaling_factor: Positive = 1.0
    """Multiplies the weights."""
    input_jitter: Fraction = 0.0
    """In training the router sees its input multiplied by Uniform(1 - jitter, 1 + jitter), element by element
    (arXiv 2101.03961, section 2.4)."""
    sinkhorn_iterations: Count = Field(default=8, le=1000)
    """Rounds of normalising over tokens and over experts; a fixed number, so that a group's outcome is its own."""
    later_tokens_choose_too: Literal["no", "accepted"] = "no"
    """Expert choice compares all tokens of a group, so that in a causal model a token's fate depends on later ones.
    `accepted` says that this is known, and lets such a model be trained."""

    # Second expert, GShard's
    second_expert: Literal["all", "sampling", "random"] = "random"
    """`all`: always the runner-up. `sampling`: drawn with Gumbel noise. `random`: the runner-up, kept with
    probability min(1, g2 / second_expert_threshold)."""
    second_expert_threshold: NonNegative = 0.5
    """0.5 is the paper's 2·g2 > rnd."""
    rejected_second_takes_slot: StrictBool = False
    """True is the paper's Algorithm 1: the running count advances for a rejected second choice too."""
    normalize_gates: Literal["before_drop", "after_drop"] = "before_drop"

    # Capacity
    capacity_factor: NonNegative | None = 2.0
    """Multiplies K·S/E (`gshard_top2` and `expert_choice`: S/E): the rows that one expert takes of one group of S
    tokens. None is dropless, as `softmax_topk`, `sigmoid_topk` and `sinkhorn_topk` are unless told otherwise.
    `expert_choice` needs a number: how many experts serve a token on average."""
    capacity_rule: Literal["released", "paper"] = "released"
    """`released`: int(S·factor/E), 4 where that is 0, rounded up to a multiple of 4; `min_capacity` where that is
    not below it. `paper`: 2S/E."""
    min_capacity: CountOrZero = 4
    """The least that an expert takes; 1 for routers other than `gshard_top2`, unless told otherwise."""
    drop_by: Literal["position", "probability"] = "position"
    """Whom a full expert turns away: who comes last (first choices before second ones, then tokens in order), or
    whose weight is the lowest."""

    # Balance
    aux_coefficient: NonNegative = 0.01
    """Weight of the load-balancing loss; 0 for `sigmoid_topk` unless told otherwise."""
    aux_form: Literal["e_squared", "paper"] = "e_squared"
    """`e_squared`: mean(density · proxy) · E², 1 when uniform. `paper`: that divided by E²."""
    aux_scope: Literal["group", "sequence", "global_batch"] = "group"
    """What is to be balanced. `global_batch` multiplies this step's probabilities with the loads of the step
    before, so that no rank and no micro-batch decides what balance is."""
    z_coefficient: NonNegative = 0.0
    """Weight of the router z-loss (ST-MoE, arXiv 2202.08906, eq. 5)."""
    bias_update_rate: NonNegative = 0.001
    """By how much an expert's bias, which counts for the choice and not for the weight, rises after a step that left
    it below the mean load, and falls after one above it (arXiv 2408.15664, Algorithm 1). 0 keeps no bias."""

    @model_validator(mode="before")
    @classmethod
    def _fields_of_the_router(cls, given: Any) -> Any:
        """Refuse fields of other routers; fill in where this router's default is its own."""
        router = given.get("router", "gshard_top2") if isinstance(given, dict) else None
        if not isinstance(router, str) or router not in OWN_DEFAULTS:
            return given  # the fields' own checks say what is wrong
        if foreign := sorted(foreign_fields(router) & given.keys()):
            raise SpecError(
                Problem(name, given[name], f"is no field of the router {router}",
                        f"leave it out, or use {' or '.join(owners(name))}")
                for name in foreign
            )  # fmt: skip
        return {**OWN_DEFAULTS[router], **given}

    @model_validator(mode="after")
    def _coherent(self) -> "MoESpec":
        if problems := list(self._problems()):
            raise SpecError(problems)
        return self

    def _problems(self) -> list[Problem]:
        experts, groups, problems = self.num_experts, self.num_expert_groups, []
        if "top_k" not in foreign_fields(self.router) and self.top_k > experts:
            problems.append(
                Problem("top_k", self.top_k, f"must be at most num_experts (={experts})", "lower it")
            )
        if self.capacity_factor is None and self.router == "expert_choice":
            problems.append(Problem("capacity_factor", None, "must be a number where experts choose",
                                    "give the experts that serve a token on average"))  # fmt: skip
        if self.shared_gate and self.shared_hidden_dim is None:
            problems.append(Problem("shared_gate", True, "needs shared experts to weigh",
                                    "give shared_hidden_dim, or leave it out"))  # fmt: skip
        if self.router != "sigmoid_topk":
            return problems
        if experts % groups:
            problems.append(Problem("num_expert_groups", groups, f"must divide num_experts (={experts})",
                                    "use a divisor of it"))  # fmt: skip
        elif self.expert_groups_per_token > groups:
            problems.append(Problem("expert_groups_per_token", self.expert_groups_per_token,
                                    f"must be at most num_expert_groups (={groups})", "lower it"))  # fmt: skip
        elif self.top_k > (standing := self.expert_groups_per_token * (experts // groups)):
            problems.append(Problem("top_k", self.top_k,
                                    f"must be at most the {standing} experts of expert_groups_per_token "
                                    f"(={self.expert_groups_per_token}) groups",
                                    "lower it, or raise expert_groups_per_token"))  # fmt: skip
        return problems

    def never_trained(self) -> Problem | None:
        """What keeps the router from learning: a choice that weighs 1 whatever its score passes no gradient on to it.

        None where it learns. No fault of a layer by itself: some families have such ones, and were trained otherwise.
        """
        if self.top_k > 1:
            return None
        own = FIELDS[self.router]
        rule = (
            "makes the weight of a token's one choice (top_k is 1) the same whatever its score, so that the router is "
            "never trained"
        )
        if "softmax" in own and self.softmax == "after_topk":
            return Problem("softmax", "after_topk", rule, "use before_topk, or a top_k of 2 or more")
        if "renormalize_gates" in own and self.renormalizes:
            return Problem("renormalize_gates", True, rule, "use false, or a top_k of 2 or more")
        return None

    @model_serializer(mode="wrap")
    def _without_foreign_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written can be read again: it has no fields of other routers."""
        return {
            name: value for name, value in handler(self).items() if name not in foreign_fields(self.router)
        }

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        foreign = foreign_fields(self.router)
        return ((name, value) for name, value in super().__repr_args__() if name not in foreign)

    @property
    def experts_per_token(self) -> int:
        """K: the experts that a token chooses; where experts choose, how many serve a token on average."""
        if self.router == "gshard_top2":
            return min(2, self.num_experts)
        if self.router == "switch_top1":
            return 1
        if self.router == "expert_choice":
            assert self.capacity_factor is not None
            return max(1, min(self.num_experts, round(self.capacity_factor)))
        return self.top_k

    @property
    def renormalizes(self) -> bool:
        """`renormalize_gates`, or what it is where left out: the weight of one choice would be 1 whatever its score."""
        return self.top_k > 1 if self.renormalize_gates is None else self.renormalize_gates

    @property
    def resolved(self) -> "MoESpec":
        """This layer with what was left to it written out: the same for specs that mean the same."""
        return self.model_copy(update={"renormalize_gates": self.renormalizes})

    @property
    def num_matrices(self) -> int:
        """Of one expert: two, or three where its activation has a gate."""
        return 3 if self.activation in ("swiglu", "geglu") else 2

    def parameters(self) -> tuple[Parameter, ...]:
        """The layer's, of the router, the experts and the shared ones."""
        width: Size = ("model", self.model_dim)
        gates = ("w_gate",) if self.num_matrices == 3 else ()
        found = [matrix("router", width, ("none", self.num_experts), self.model_dim)]
        inner: Size = ("expert_hidden", self.hidden_dim)
        of_expert = [matrix(name, width, inner, self.model_dim) for name in ("w_in", *gates)]
        of_expert.append(matrix("w_out", inner, width, self.hidden_dim))
        if self.expert_bias:
            biases = ["b_in", *(["b_gate"] if gates else [])]
            of_expert += [Parameter(name, (self.hidden_dim,), ("expert_hidden",), 0.0) for name in biases]
            of_expert.append(Parameter("b_out", (self.model_dim,), ("expert_output",), 0.0))
        found += within("experts", (each.times("expert", self.num_experts) for each in of_expert))
        if self.shared_hidden_dim is not None:
            shared: Size = ("none", self.shared_hidden_dim)
            of_shared = [matrix(name, width, shared, self.model_dim) for name in ("w_in", *gates)]
            of_shared.append(matrix("w_out", shared, width, self.shared_hidden_dim))
            if self.shared_gate:
                of_shared.append(matrix("gate", width, ("none", 1), self.model_dim))
            found += within("shared", of_shared)
        return tuple(found)

    @property
    def parameters_per_expert(self) -> int:
        return sum(each.numel for each in self.parameters() if each.of_experts) // self.num_experts

    @property
    def keeps_bias(self) -> bool:
        """Whether the layer carries a bias from step to step."""
        return self.router == "sigmoid_topk" and self.bias_update_rate > 0

    @property
    def keeps_load(self) -> bool:
        """Whether the layer carries the loads of the last step to the next one."""
        return self.aux_scope == "global_batch"
