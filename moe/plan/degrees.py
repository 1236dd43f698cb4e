"""Degrees: the number of ranks of each axis, which a planner chooses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ConfigDict

from moe.spec.base import Count


class WorkSplit(NamedTuple):
    """Ranks that share the arithmetic of a micro-batch."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1


class ShardCounts(NamedTuple):
    """Parts that parameters are in, by mesh axis."""

    tensor: int = 1
    fsdp: int = 1
    expert: int = 1
    expert_tensor: int = 1
    expert_fsdp: int = 1

    @classmethod
    def from_degrees(cls, degrees: Mapping[str, int]) -> "ShardCounts":
        """Counts by mesh axis; 1 for an axis that is left out."""
        return cls(*(degrees.get(axis, 1) for axis in cls._fields))


@dataclass(frozen=True)
class Degrees:
    """Ranks along the axes of both meshes.

    The same ranks are folded into two meshes: (data, context, tensor) for all parameters but those of experts, and
    (expert-data, expert, expert-tensor) for these. Ranks are numbered with the last axis of each running fastest, so
    that the ranks of one tensor or expert group are consecutive and share a node where nodes hold enough of them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    expert: Count = 1
    """Ranks that the experts of each layer are spread over."""
    data: Count = 1
    """Ranks that have to do with the same parts of experts: expert-data."""
    tensor: Count = 1
    """Ranks that attention heads and feed-forward layers without experts are split over. In all other layers each of
    them works on its share of their tokens."""
    fsdp: Count = 1
    """Data and context ranks that each parameter outside experts is sharded over, to be gathered where it is used: 1
    replicates it on all, as many as there are of both is FSDP, between the two is HSDP."""
    expert_tensor: Count = 1
    """Ranks that the hidden dimension of each expert is split over."""
    expert_fsdp: Count = 1
    """Number of the `data` ranks that each parameter of an expert is sharded over."""
    context: Count = 1
    """Ranks that each sequence is split over."""
    pipeline: Count = 1
    """Stages of consecutive layers; the meshes are those of one stage."""

    @property
    def stage_workers(self) -> int:
        """Ranks of one pipeline stage."""
        return self.expert * self.expert_tensor * self.data

    @property
    def num_workers(self) -> int:
        return self.stage_workers * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks of a stage that have groups of their own: those of one tensor or context group share theirs."""
        return self.stage_workers // (self.tensor * self.context)

    @property
    def replica_ranks(self) -> int:
        """Ranks of a stage that have the same parts of what is outside experts: data ranks, and those of context."""
        return self.stage_workers // self.tensor

    @property
    def axes(self) -> dict[str, int]:
        """Degrees by axis of both meshes."""
        return {
            "pipeline": self.pipeline,
            "data_replica": max(1, self.data_ranks // self.fsdp),
            "fsdp": self.fsdp,
            "context": self.context,
            "tensor": self.tensor,
            "expert_replica": self.data // self.expert_fsdp,
            "expert_fsdp": self.expert_fsdp,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
        }

    @property
    def num_further_axes(self) -> int:
        """Axes that a model is split over beside those of data and whole experts."""
        return sum(degree > 1 for degree in (self.tensor, self.context, self.expert_tensor, self.pipeline))

    @property
    def split(self) -> WorkSplit:
        return WorkSplit(self.tensor, self.context, self.expert, self.expert_tensor)

    @property
    def shards(self) -> ShardCounts:
        return ShardCounts(self.tensor, self.fsdp, self.expert, self.expert_tensor, self.expert_fsdp)

    @property
    def order(self) -> tuple[int, ...]:
        """Key that decides between equals: the fewest splits, and experts spread the widest."""
        return (
            self.pipeline,
            self.context,
            self.tensor,
            self.expert_tensor,
            -self.expert,
            self.fsdp,
            self.expert_fsdp,
        )

    def __str__(self) -> str:
        always = ("expert", "data")
        entries = [(name, degree) for name, degree in vars(self).items() if degree > 1 or name in always]
        return " x ".join(f"{name} {degree}" for name, degree in entries)
