"""A layout of a job: searches enumerate candidates, and memory and time are predicted for each."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ConfigDict

from moe.plan.degrees import Degrees
from moe.spec.base import Count

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["optimizer", "gradients", "parameters"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
CHUNKS = (1, 2, 4)
"""Numbers of chunks that are tried."""


@dataclass(frozen=True)
class Options:
    """Options of a step under given degrees."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sharding: Sharding = "parameters"
    """State that `fsdp` and `expert_fsdp` ranks shard: the optimizer's, gradients too, or parameters too."""
    recompute: Recompute = "none"
    """Recomputation in the backward pass: nothing, the hidden states of feed-forward layers and experts, or
    whole blocks."""
    virtual_stages: Count = 1
    """Runs of layers that each pipeline stage has."""
    num_chunks: Count = 1
    """Chunks that rows travel to experts in, so that exchange and arithmetic overlap."""
    overlap: bool = False
    """Whether the rows of one micro-batch travel while another one is worked on."""
    ranks_per_node: Count | None = None
    """Hierarchical dispatch: expert groups that span nodes of so many ranks send a token to another node only once,
    however many of its experts live there. None sends it straight to each."""
    micro_batch_groups: Count = 1
    """Groups that one data rank runs forward and backward at a time."""
    num_micro_batches: Count = 1
    """The same on every rank: those with fewer groups take part in the collectives without any."""
    max_rows: Count | None = None
    """Rows of a chunk that a rank takes from others at most: where more are routed to its experts, there are more
    chunks. Left out, there is no bound."""


@dataclass(frozen=True)
class Candidate:
    """Degrees and options."""

    degrees: Degrees
    options: Options = Options()

    def having(self, **options: Any) -> "Candidate":
        """The same degrees with other options."""
        return Candidate(self.degrees, replace(self.options, **options))

    @property
    def is_sharded(self) -> bool:
        """Whether anything is sharded over data ranks."""
        return self.degrees.fsdp > 1 or self.degrees.expert_fsdp > 1

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered where they are used."""
        return self.is_sharded and self.options.sharding == "parameters"

    def __str__(self) -> str:
        """Degrees, and what tells ways to run them apart."""
        of = self.options
        parts = [str(self.degrees), f"micro-batches of {of.micro_batch_groups}"]
        parts += [f"recompute {of.recompute}"] * (of.recompute != "none")
        parts += [f"{of.virtual_stages} runs a stage"] * (of.virtual_stages > 1)
        return ", ".join(parts)

    @property
    def key(self) -> tuple[object, ...]:
        """Key that decides between candidates of the same predicted step: the fewest splits."""
        of = self.options
        return (*self.degrees.order, of.sharding, of.virtual_stages, of.overlap, of.num_chunks,
                of.ranks_per_node or 0, -of.micro_batch_groups, RECOMPUTES.index(of.recompute))  # fmt: skip
