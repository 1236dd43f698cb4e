"""One way to lay a job out: what a search enumerates, and what memory and time are predicted of."""

from dataclasses import dataclass
from typing import Literal

from moe.plan.degrees import Degrees

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["optimizer", "gradients", "parameters"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Candidate:
    """Degrees and everything else that a plan says of how a step is run."""

    degrees: Degrees
    micro_batch_groups: int = 1
    num_micro_batches: int = 1
    sharding: Sharding = "parameters"
    recompute: Recompute = "none"
    virtual_stages: int = 1
    num_chunks: int = 1
    ranks_per_node: int | None = None
    """For hierarchical dispatch."""
    overlap: bool = False
    """Whether the rows of one micro-batch travel while another one is worked on."""

    @property
    def cut_up(self) -> bool:
        """Whether anything is cut up over data ranks."""
        return self.degrees.fsdp > 1 or self.degrees.expert_fsdp > 1

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered where they are used."""
        return self.cut_up and self.sharding == "parameters"

    @property
    def key(self) -> tuple[object, ...]:
        """What decides between candidates of the same predicted step: the fewest splits."""
        return (*self.degrees.order, self.sharding, self.virtual_stages, self.overlap, self.num_chunks,
                self.ranks_per_node or 0, -self.micro_batch_groups, RECOMPUTES.index(self.recompute))  # fmt: skip
