"""Candidate layout: the unit that the search enumerates and the cost models price."""

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
"""Values of `num_chunks` that the search tries."""


@dataclass(frozen=True)
class Options:
    """Options of a layout beside its degrees."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sharding: Sharding = "parameters"
    """State sharded over `fsdp` and `expert_fsdp` ranks: optimizer state, plus gradients, plus parameters (ZeRO-1,
    2, 3)."""
    recompute: Recompute = "none"
    """Activation recomputation: none; selective, of the hidden states of feed-forward layers and experts; full, of
    whole blocks."""
    virtual_stages: Count = 1
    """Virtual stages (model chunks) of each pipeline stage."""
    num_chunks: Count = 1
    """Chunks that the dispatched rows are split into, to overlap all-to-all and computation."""
    overlap: bool = False
    """Whether the all-to-all of one micro-batch overlaps with the computation of another."""
    ranks_per_node: Count | None = None
    """Hierarchical dispatch with this many ranks per node: a token is sent to another node once, however many of its
    experts are there. None sends it to each expert's rank directly."""
    micro_batch_groups: Count = 1
    """Token groups of a micro-batch on one data rank."""
    num_micro_batches: Count = 1
    """The same on every rank: ranks with fewer groups join the collectives with empty micro-batches."""
    max_rows: Count | None = None
    """Most rows of a chunk that a rank receives; if more are routed to its experts, there are more chunks. None
    means no bound."""


@dataclass(frozen=True)
class Candidate:
    """Degrees and options of a layout."""

    degrees: Degrees
    options: Options = Options()

    def having(self, **options: Any) -> "Candidate":
        """Return a copy with other options."""
        return Candidate(self.degrees, replace(self.options, **options))

    @property
    def is_sharded(self) -> bool:
        """Whether any state is sharded over data ranks."""
        return self.degrees.fsdp > 1 or self.degrees.expert_fsdp > 1

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered where they are used."""
        return self.is_sharded and self.options.sharding == "parameters"

    def __str__(self) -> str:
        """Degrees, and the options that tell candidates apart."""
        of = self.options
        parts = [str(self.degrees), f"micro-batches of {of.micro_batch_groups}"]
        parts += [f"recompute {of.recompute}"] * (of.recompute != "none")
        parts += [f"{of.virtual_stages} runs a stage"] * (of.virtual_stages > 1)
        return ", ".join(parts)

    @property
    def key(self) -> tuple[object, ...]:
        """Tie-breaking key for candidates of equal predicted step time: prefers the fewest splits."""
        of = self.options
        return (*self.degrees.order, of.sharding, of.virtual_stages, of.overlap, of.num_chunks,
                of.ranks_per_node or 0, -of.micro_batch_groups, RECOMPUTES.index(of.recompute))  # fmt: skip
