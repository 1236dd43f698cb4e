"""How many ranks each axis has: what a planner chooses between."""

from dataclasses import dataclass
from typing import NamedTuple


class Split(NamedTuple):
    """Ranks that share the arithmetic of a micro-batch."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1


class Shards(NamedTuple):
    """Parts that parameters are in, by mesh axis."""

    tensor: int = 1
    fsdp: int = 1
    expert: int = 1
    expert_tensor: int = 1
    expert_fsdp: int = 1


@dataclass(frozen=True)
class Degrees:
    """Ranks along the axes of both meshes; what each means, `Plan` says."""

    expert: int = 1
    data: int = 1
    tensor: int = 1
    fsdp: int = 1
    expert_tensor: int = 1
    expert_fsdp: int = 1
    context: int = 1
    pipeline: int = 1

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
    def axes(self) -> dict[str, int]:
        """By axis of both meshes."""
        return {
            "pipeline": self.pipeline,
            "data_replica": self.data_ranks // self.fsdp,
            "fsdp": self.fsdp,
            "context": self.context,
            "tensor": self.tensor,
            "expert_replica": self.data // self.expert_fsdp,
            "expert_fsdp": self.expert_fsdp,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
        }

    @property
    def split(self) -> Split:
        return Split(self.tensor, self.context, self.expert, self.expert_tensor)

    @property
    def shards(self) -> Shards:
        return Shards(self.tensor, self.fsdp, self.expert, self.expert_tensor, self.expert_fsdp)

    @property
    def folds(self) -> bool:
        """Whether both meshes come out even over the same ranks."""
        in_attention = self.tensor * self.context * self.fsdp
        return self.stage_workers % in_attention == 0 and self.data % self.expert_fsdp == 0

    @property
    def order(self) -> tuple[int, ...]:
        """What decides between equals: the fewest splits, and experts spread the widest."""
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
        named = [(name, degree) for name, degree in vars(self).items() if degree > 1 or name in always]
        return " x ".join(f"{name} {degree}" for name, degree in named)
