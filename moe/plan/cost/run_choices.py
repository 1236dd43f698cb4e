"""Choices of a candidate that what a stage holds depends on: its state, and what is beside it."""

from typing import NamedTuple

from moe.plan.candidate import Candidate, Recompute, Sharding
from moe.plan.degrees import Degrees, WorkSplit


class StateOptions(NamedTuple):
    """Choices of a candidate that the state of a stage depends on."""

    degrees: Degrees
    sharding: Sharding
    """`parameters` where nothing is sharded."""
    recomputes_blocks: bool
    """Whether whole blocks are computed again."""

    @classmethod
    def from_degrees(cls, degrees: Degrees, sharding: Sharding, recompute: Recompute) -> "StateOptions":
        is_sharded = degrees.fsdp > 1 or degrees.expert_fsdp > 1
        return cls(degrees, sharding if is_sharded else "parameters", recompute == "full")


class RunChoices(NamedTuple):
    """Choices of a candidate that the memory beside its state depends on."""

    pipeline: int
    virtual_stages: int
    split: WorkSplit
    groups: int
    num_micro_batches: int
    recompute: Recompute
    overlap: bool

    @classmethod
    def from_candidate(cls, candidate: Candidate) -> "RunChoices":
        degrees, options = candidate.degrees, candidate.options
        return cls(
            degrees.pipeline, options.virtual_stages, degrees.split, options.micro_batch_groups,
            options.num_micro_batches, options.recompute, options.overlap,
        )  # fmt: skip


def placed_of(candidate: Candidate) -> StateOptions:
    """The choices of a candidate that its state depends on."""
    return StateOptions.from_degrees(
        candidate.degrees, candidate.options.sharding, candidate.options.recompute
    )
