"""Candidate layout: the unit that the search enumerates and the cost models price."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import ConfigDict

from moe.plan.degrees import Degrees
from moe.spec.base import Count
from moe.spec.parallel import ContextExchange, PipelineSchedule
from moe.spec.stages import format_stages

Recompute = Literal["none", "selective", "full"]
Sharding = Literal["optimizer", "gradients", "parameters"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Sharding, ...] = ("optimizer", "gradients", "parameters")
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
EXCHANGES: tuple[ContextExchange, ...] = get_args(ContextExchange)
CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Options:
    """Options of a layout in addition to its degrees."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sharding: Sharding = "parameters"
    """State sharded over `fsdp` and `expert_fsdp` ranks; each value includes those before it (ZeRO-1, 2, 3)."""
    recompute: Recompute = "none"
    """Activation recomputation: none, hidden states of feed-forward layers and experts, or whole blocks."""
    virtual_stages: Count = 1
    """Model chunks per pipeline rank."""
    schedule: PipelineSchedule | None = None
    """Order of passes over pipeline stages. None: `interleaved` with virtual stages, else `1f1b`."""
    stages: tuple[Count, ...] | None = None
    """Layers of each virtual stage, in model order. None: as even as possible (`even_stages`)."""
    context_exchange: ContextExchange = "gather"
    """Exchange of keys and values between context ranks."""
    num_chunks: Count = 1
    """Chunks of dispatched rows, to overlap all-to-all and computation."""
    overlap: bool = False
    """Whether one micro-batch's all-to-all overlaps with another's computation."""
    ranks_per_node: Count | None = None
    """Hierarchical dispatch: ranks per node; a token is sent to another node once, however many of its experts are
    there. None sends it to each expert's rank."""
    micro_batch_groups: Count = 1
    """Token groups of a micro-batch on one data rank."""
    num_micro_batches: Count = 1
    """The same on every rank; ranks with fewer token groups join the collectives with empty micro-batches."""
    max_rows: Count | None = None
    """Most rows that a rank receives per chunk; excess rows take more chunks. None for no bound."""

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """`schedule`, or its default."""
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")


@dataclass(frozen=True)
class Candidate:
    """Degrees and options of a layout."""

    degrees: Degrees
    options: Options = Options()

    def with_options(self, **options: Any) -> "Candidate":
        """Return a copy with other options."""
        return Candidate(self.degrees, replace(self.options, **options))

    @property
    def schedule(self) -> PipelineSchedule:
        """The options' schedule, or its default: `gpipe` for too few micro-batches to keep all ranks busy."""
        options = self.options
        too_few = options.num_micro_batches < self.degrees.pipeline and options.virtual_stages == 1
        return options.schedule or ("gpipe" if too_few else options.pipeline_schedule)

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
        options = self.options
        parts = [str(self.degrees), f"micro-batches of {options.micro_batch_groups}"]
        parts += [f"recompute {options.recompute}"] * (options.recompute != "none")
        parts += [f"{options.virtual_stages} virtual stages"] * (options.virtual_stages > 1)
        parts += [] if options.schedule is None else [f"schedule {options.schedule}"]
        parts += [] if options.stages is None else [f"stages {format_stages(options.stages)}"]
        parts += [f"{options.context_exchange} exchange"] * (self.degrees.context > 1)
        return ", ".join(parts)

    @property
    def key(self) -> tuple[object, ...]:
        """Tie-breaking key at equal step times: the fewest splits first."""
        options = self.options
        return (*self.degrees.order, options.sharding, options.virtual_stages, options.overlap, options.num_chunks,
                options.ranks_per_node or 0, -options.micro_batch_groups,
                RECOMPUTES.index(options.recompute), SCHEDULES.index(options.pipeline_schedule), options.stages or (),
                EXCHANGES.index(options.context_exchange))  # fmt: skip
