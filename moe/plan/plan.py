"""The plan: how one job will be laid out, frozen, with its predictions and its reasons."""

from typing import Literal

from pydantic import model_validator

from moe.plan.degrees import Degrees
from moe.spec.base import Count, CountOrZero, Frozen, Spec
from moe.spec.errors import Problem, SpecError


class MemoryEstimate(Frozen):
    """Predicted bytes on the fullest device, by kind."""

    parameters: CountOrZero
    gradients: CountOrZero
    optimizer: CountOrZero
    activations: CountOrZero
    """What the backward pass needs of one micro-batch."""
    dispatch: CountOrZero
    """Tokens on their way to experts and back, and inside experts."""
    logits: CountOrZero
    communication: CountOrZero
    """Gradients laid end to end for their all-reduce, and what FSDP has gathered at a time."""
    staging: CountOrZero
    """The copy that a checkpoint is written from while training goes on; on a GPU it lies in the host's memory."""
    limit: CountOrZero
    """What the device has."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in type(self).model_fields if kind != "limit"}


class TimeEstimate(Frozen):
    """Predicted seconds of one step, by kind: a prediction, to be read beside what is measured."""

    arithmetic_s: float
    all_to_all_s: float
    all_reduce_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        return self.arithmetic_s + self.all_to_all_s + self.all_reduce_s + self.optimizer_s


class RunnerUp(Frozen):
    """A layout that was considered and not chosen, and why."""

    expert: Count
    data: Count
    why_not: str


class Plan(Spec):
    """The layout of a job, from the planner or by hand.

    The same ranks are folded into two meshes: (data, tensor) for all parameters but those of experts, and
    (expert-data, expert, expert-tensor) for these. Ranks are numbered with the last axis of each running fastest, so
    that the ranks of one tensor or expert group are consecutive and share a node where nodes hold enough of them.

    Raises SpecError where the degrees do not multiply to the number of workers.
    """

    version: Literal[1] = 1
    num_workers: Count
    tensor: Count = 1
    """Ranks that attention heads and feed-forward layers without experts are split over. In all other layers each of
    them works on its share of their tokens."""
    fsdp: Count = 1
    """Data ranks that each parameter outside experts is cut up over, to be gathered where it is used: 1 replicates it
    on all, as many as there are data ranks is FSDP, between the two is HSDP."""
    expert: Count
    """Ranks that the experts of each layer are spread over."""
    expert_tensor: Count = 1
    """Ranks that the hidden dimension of each expert is split over."""
    data: Count
    """Ranks that have to do with the same parts of experts: expert-data."""
    expert_fsdp: Count = 1
    """Of those, ranks that each parameter of an expert is cut up over."""
    num_chunks: Count = 1
    """Chunks that rows travel to experts in, so that exchange and arithmetic overlap."""
    most_rows: Count | None = None
    """Rows of a chunk that a rank takes from others at most: where more are routed to its experts, there are more
    chunks. Left out, there is no bound."""
    ranks_per_node: Count | None = None
    """Where given, expert groups that span nodes of so many ranks send a token to another node only once, however
    many of its experts live there."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass: nothing, the hidden states of feed-forward layers and experts, or
    whole blocks."""
    micro_batch_groups: Count
    """Groups that one data rank runs forward and backward at a time."""
    num_micro_batches: Count
    """The same on every rank: those with fewer groups take part in the collectives without any."""
    device: Literal["cpu", "cuda", "tpu"]
    device_type: str
    memory: MemoryEstimate
    predicted: TimeEstimate
    tokens_per_step: Count
    reasons: tuple[str, ...]
    runners_up: tuple[RunnerUp, ...] = ()

    @model_validator(mode="after")
    def _multiplies(self) -> "Plan":
        in_experts = self.expert * self.expert_tensor * self.data
        problems = []
        if in_experts != self.num_workers:
            problems.append(
                Problem("expert", self.expert,
                        f"times expert_tensor (={self.expert_tensor}) and data (={self.data}) must be num_workers "
                        f"(={self.num_workers})", f"use {in_experts} workers, or other degrees")
            )  # fmt: skip
        if self.num_workers % self.tensor:
            problems.append(
                Problem("tensor", self.tensor, f"must divide num_workers (={self.num_workers})",
                        "use a divisor of it")
            )  # fmt: skip
        elif (data_ranks := self.num_workers // self.tensor) % self.fsdp:
            problems.append(
                Problem("fsdp", self.fsdp, f"must divide the data ranks (={data_ranks}), num_workers "
                        f"(={self.num_workers}) over tensor (={self.tensor})", "use a divisor of them")
            )  # fmt: skip
        if self.data % self.expert_fsdp:
            problems.append(
                Problem(
                    "expert_fsdp", self.expert_fsdp, f"must divide data (={self.data})", "use a divisor of it"
                )
            )
        if self.ranks_per_node and (self.expert * self.expert_tensor) % self.ranks_per_node:
            problems.append(
                Problem("ranks_per_node", self.ranks_per_node,
                        f"must divide the ranks of an expert group (={self.expert * self.expert_tensor})",
                        "leave it out, or use another expert degree")
            )  # fmt: skip
        elif self.ranks_per_node and self.ranks_per_node % self.expert_tensor:
            problems.append(
                Problem("ranks_per_node", self.ranks_per_node,
                        f"must be a multiple of expert_tensor (={self.expert_tensor}): an expert lives on a node",
                        "use a smaller expert_tensor degree")
            )  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axes of the experts, outermost first, and beside them what else is split."""
        names = ("expert_fsdp", "expert_tensor", "tensor", "fsdp")
        beside = {name: getattr(self, name) for name in names}
        shown = {axis: degree for axis, degree in beside.items() if degree > 1}
        return {"expert_data": self.data, "expert": self.expert, **shown}

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.expert, self.data, self.tensor, self.fsdp, self.expert_tensor, self.expert_fsdp)
