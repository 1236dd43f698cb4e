"""Cache keys of the memory model."""

from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute, Sharding
from moe.plan.cost.stages import PipelineChoices
from moe.plan.degrees import Degrees, WorkSplit
from moe.spec.parallel import ContextExchange


class StateOptions(NamedTuple):
    """Choices that a stage's state depends on."""

    degrees: Degrees
    sharding: Sharding
    """`parameters` if nothing is sharded."""
    recomputes_blocks: bool

    @classmethod
    def from_degrees(cls, degrees: Degrees, sharding: Sharding, recompute: Recompute) -> "StateOptions":
        is_sharded = degrees.fsdp > 1 or degrees.expert_fsdp > 1
        return cls(degrees, sharding if is_sharded else "parameters", recompute == "full")

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> "StateOptions":
        return cls.from_degrees(candidate.degrees, candidate.options.sharding, candidate.options.recompute)


class RunChoices(NamedTuple):
    """Choices that memory other than the state depends on."""

    pipeline: PipelineChoices
    split: WorkSplit
    groups: int
    num_micro_batches: int
    recompute: Recompute
    overlap: bool
    context_exchange: ContextExchange

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> "RunChoices":
        degrees, options = candidate.degrees, candidate.options
        return cls(
            PipelineChoices.from_candidate(candidate), degrees.split, options.micro_batch_groups,
            options.num_micro_batches, options.recompute, options.overlap, options.context_exchange,
        )  # fmt: skip
