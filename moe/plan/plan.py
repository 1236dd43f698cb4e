"""The plan: how one job will be laid out, frozen, with its predictions and its reasons."""

from typing import Literal

from moe.spec.base import Count, CountOrZero, Frozen


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
    """Gradients laid end to end for their all-reduce."""
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


class Plan(Frozen):
    """The layout of a job. Ranks are numbered data-major: rank = data_rank * expert + expert_rank, so that
    the ranks of one expert group are consecutive and share a node where nodes hold enough of them."""

    version: Literal[1] = 1
    num_workers: Count
    expert: Count
    """Ranks that the experts of each layer are spread over."""
    data: Count
    """Replicas of each expert; everything else is replicated on all workers."""
    micro_batch_groups: Count
    """Groups that one rank runs forward and backward at a time."""
    num_micro_batches: Count
    """The same on every rank: those with fewer groups take part in the collectives without any."""
    device: Literal["cpu", "cuda", "tpu"]
    device_type: str
    memory: MemoryEstimate
    predicted: TimeEstimate
    tokens_per_step: Count
    reasons: tuple[str, ...]
    runners_up: tuple[RunnerUp, ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axes, outermost first."""
        return {"expert_data": self.data, "expert": self.expert}
