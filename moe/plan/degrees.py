"""Parallelism degrees: number of ranks along each mesh axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from pydantic import ConfigDict

from moe.spec.base import Count


class WorkSplit(NamedTuple):
    """Degrees that split the computation of one micro-batch."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1


class ShardCounts(NamedTuple):
    """Number of shards of parameters along each mesh axis."""

    tensor: int = 1
    fsdp: int = 1
    expert: int = 1
    expert_tensor: int = 1
    expert_fsdp: int = 1

    @classmethod
    def from_degrees(cls, degrees: Mapping[str, int]) -> "ShardCounts":
        """Return the counts by axis; missing axes count 1."""
        return cls(*(degrees.get(axis, 1) for axis in cls._fields))


@dataclass(frozen=True)
class Degrees:
    """Number of ranks along each mesh axis.

    Two meshes are folded from the same ranks: (data, context, tensor) for parameters outside experts, and
    (expert-data, expert, expert-tensor) for expert parameters. The last axis varies fastest, so that the ranks of a
    tensor or expert group are consecutive and, if nodes are large enough, share a node.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    expert: Count = 1
    """Ranks that a layer's experts are spread over."""
    data: Count = 1
    """Expert-data parallelism: ranks with the same expert shards."""
    tensor: Count = 1
    """Ranks that split attention heads and dense feed-forward layers; other layers are sequence-parallel."""
    fsdp: Count = 1
    """Data and context ranks that shard a parameter outside experts: 1 replicates it, all is FSDP, in between is HSDP.
    Context ranks come first: the largest number of them that divides both degrees."""
    expert_tensor: Count = 1
    """Ranks that split the hidden dimension of each expert."""
    expert_fsdp: Count = 1
    """`data` ranks that shard each expert parameter."""
    context: Count = 1
    """Context parallelism: ranks that split each sequence."""
    pipeline: Count = 1
    """Pipeline stages of consecutive layers; each mesh is within one stage."""

    @property
    def stage_workers(self) -> int:
        return self.expert * self.expert_tensor * self.data

    @property
    def num_workers(self) -> int:
        return self.stage_workers * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks of a stage with their own token groups; a tensor or context group shares them."""
        return self.stage_workers // (self.tensor * self.context)

    @property
    def replica_ranks(self) -> int:
        """Ranks of a stage with the same shards outside experts: data times context ranks."""
        return self.stage_workers // self.tensor

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks by axis of both meshes."""
        return {
            "pipeline": self.pipeline,
            "data_replica": max(1, self.data_ranks * gcd(self.fsdp, self.context) // self.fsdp),
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
        """Number of axes in use other than data and expert."""
        return sum(degree > 1 for degree in (self.tensor, self.context, self.expert_tensor, self.pipeline))

    @property
    def split(self) -> WorkSplit:
        return WorkSplit(self.tensor, self.context, self.expert, self.expert_tensor)

    @property
    def shards(self) -> ShardCounts:
        return ShardCounts(self.tensor, self.fsdp, self.expert, self.expert_tensor, self.expert_fsdp)

    @property
    def order(self) -> tuple[int, ...]:
        """Tie-breaking key: prefers the fewest splits and the widest spread of experts."""
        return (self.pipeline, self.context, self.tensor, self.expert_tensor, -self.expert, self.fsdp, self.expert_fsdp)

    def __str__(self) -> str:
        always = ("expert", "data")
        entries = [(name, degree) for name, degree in vars(self).items() if degree > 1 or name in always]
        return " x ".join(f"{name} {degree}" for name, degree in entries)
