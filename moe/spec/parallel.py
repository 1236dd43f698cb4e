"""Parallelism degrees and options of a job."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from moe.spec.base import Count, Spec
from moe.spec.errors import RuleError
from moe.spec.stages import format_stages, parse_stages

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v"]
ContextExchange = Literal["gather", "ring", "heads"]
VIRTUAL_STAGES_OF_ZB_V = 2
"""Virtual stages per pipeline rank: one on the way down the V, one on the way up."""


def check_virtual_stages(schedule: PipelineSchedule, virtual_stages: int) -> None:
    """Raise RuleError if the schedule does not have so many virtual stages per rank."""
    if schedule == "zb_v" and virtual_stages != VIRTUAL_STAGES_OF_ZB_V:
        raise RuleError("conflict",
                        f"has schedule (='zb_v') with virtual_stages (={virtual_stages}), but a V has "
                        f"{VIRTUAL_STAGES_OF_ZB_V} per rank",
                        "omit virtual_stages, or use interleaved")  # fmt: skip
    if schedule == "interleaved" and virtual_stages == 1:
        raise RuleError("conflict",
                        "has schedule (='interleaved') with virtual_stages (=1), but it interleaves 2 or more",
                        "raise virtual_stages, or use 1f1b")  # fmt: skip
    if schedule in ("gpipe", "1f1b", "zero_bubble") and virtual_stages > 1:
        raise RuleError("conflict",
                        f"has schedule (={schedule!r}) with virtual_stages (={virtual_stages}), but it has one "
                        "stage per rank",
                        "omit virtual_stages, or use interleaved")  # fmt: skip


class ParallelSpec(Spec):
    """Parallelism degrees and options. The planner chooses those that are unset; `auto` leaves all unset."""

    auto: Literal["predicted", "measured"] = "predicted"
    """`predicted` uses the plan with the shortest predicted step; `measured` runs the three best for five steps each
    and uses the fastest."""
    expert: Count | None = None
    """Expert parallelism: ranks that a layer's experts are spread over."""
    data: Count | None = None
    """Expert-data parallelism: replicas of each expert."""
    tensor: Count | None = None
    """Tensor parallelism: ranks that split attention heads and dense feed-forward layers."""
    context: Count | None = None
    """Context parallelism: ranks that split each sequence."""
    context_exchange: ContextExchange | None = None
    """Exchange of keys and values between context ranks. `gather`: all-gather; `ring`: one rank's at a time, behind
    attention to those before (Ring Attention, arXiv 2310.01889); `heads`: all-to-all of queries, keys and values, so
    that each rank has whole sequences of its heads (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    pipeline: Count | None = None
    """Pipeline stages of consecutive layers."""
    virtual_stages: Count | None = None
    """Model chunks per pipeline rank, to shrink the pipeline bubble (arXiv 2104.04473, section 2.2)."""
    schedule: PipelineSchedule | None = None
    """Order of the micro-batches' forward and backward passes over pipeline stages. `gpipe`: all forward passes first
    (arXiv 1811.06965); `1f1b`: each rank alternates between them (arXiv 2104.04473), with virtual stages `interleaved`;
    `zero_bubble`: 1F1B with weight gradients later than input gradients, where a rank would wait (ZB-H1, arXiv
    2401.10241, section 2.2); `zb_v`: the same with two virtual stages per rank, in the order of a V (section 6)."""
    stages: Annotated[tuple[Count, ...], BeforeValidator(parse_stages), Field(min_length=2)] | None = None
    """Number of layers of each virtual stage, in model order: encoder layers before decoder layers. The first stage has
    the embeddings too, the last one the final norm and the head."""
    fsdp: Count | None = None
    """FSDP: ranks that shard each parameter outside experts."""
    sharding: Literal["optimizer", "gradients", "parameters"] | None = None
    """State sharded over `fsdp` and `expert_fsdp` ranks (ZeRO stages 1 to 3, arXiv 1910.02054): optimizer state, with
    parameters whole on each rank and gathered after each update; gradients too, reduce-scattered in every micro-batch;
    or parameters too, gathered where they are used."""
    expert_tensor: Count | None = None
    """Tensor parallelism within experts: ranks that split each expert's hidden dimension."""
    expert_fsdp: Count | None = None
    """FSDP of experts: ranks that shard each expert parameter, among its `data` replicas."""
    dispatch: Literal["flat", "hierarchical", "deepep"] | None = None
    """Dispatch to experts. `flat` sends each row to its expert's rank; `hierarchical` sends a token once to each node
    that has experts for it, then within the node; `deepep` sends it once to each rank that has some, by DeepEP.
    Default: DeepEP in place of `flat` where it is installed, GPUs are of Hopper or newer, and rows are bfloat16. Plans
    count it as `flat`."""
    num_chunks: Count | None = None
    """Chunks of dispatched rows, to overlap all-to-all and computation."""
    overlap: StrictBool | None = None
    """Whether one micro-batch's all-to-all overlaps another's computation: a forward and a backward pass alternate
    within blocks, so that whole blocks cannot be recomputed. In a pipeline, with the schedule `interleaved`. Planned
    only where parameters are sharded, which the passes would gather and free at different times."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activation recomputation: none, hidden states of feed-forward layers and experts, or whole blocks."""
    micro_batch_groups: Count | None = None
    """Token groups of a micro-batch on one data rank."""

    @model_validator(mode="after")
    def _check_overlap(self) -> "ParallelSpec":
        if self.overlap and self.recompute == "full":
            raise RuleError("conflict",
                            "has overlap (=True) with recompute (='full'), which recomputes whole blocks at once",
                            "use recompute selective, or omit overlap")  # fmt: skip
        if self.overlap and (self.num_chunks or 1) > 1:
            raise RuleError("conflict",
                            f"has overlap (=True) and num_chunks (={self.num_chunks}), two ways to hide exchanges",
                            "omit one of them")  # fmt: skip
        if self.overlap and self.expert == self.expert_tensor == 1:
            raise RuleError("not_applicable", "has overlap (=True), but no rows travel: expert and expert_tensor are 1",
                            "omit overlap")  # fmt: skip
        if self.overlap and (self.pipeline or 1) > 1 and self.virtual_stages == 1:
            raise RuleError("conflict",
                            f"has overlap (=True) in a pipeline (={self.pipeline}) with virtual_stages (=1), but "
                            "overlap alternates micro-batches of virtual stages",
                            "use 2 or more, or omit overlap")  # fmt: skip
        if self.overlap and self.schedule not in (None, "interleaved"):
            raise RuleError("conflict",
                            f"has overlap (=True) with schedule (={self.schedule!r}), in which no two passes need "
                            "nothing of each other",
                            "use interleaved, or omit overlap")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> "ParallelSpec":
        if self.schedule is not None and self.virtual_stages is not None:
            check_virtual_stages(self.schedule, self.virtual_stages)
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> "ParallelSpec":
        if self.stages is None:
            return self
        num_stages, per_rank = len(self.stages), self.num_virtual_stages
        if self.pipeline is not None and per_rank is not None and num_stages != self.pipeline * per_rank:
            raise RuleError("mismatch",
                            f"has {num_stages} stages, but pipeline (={self.pipeline}) times virtual stages "
                            f"(={per_rank}) is {self.pipeline * per_rank}",
                            "list a number of layers for each virtual stage")  # fmt: skip
        least = (self.pipeline or 2) * self.min_virtual
        if self.min_virtual > 1 and per_rank is None and self.pipeline != 1 and num_stages < least:
            option = "overlap" if self.schedule is None else "schedule interleaved"
            raise RuleError("mismatch",
                            f"has {num_stages} stages, but {option} needs at least {least}: {self.min_virtual} on each "
                            "of a pipeline's ranks",
                            f"list more stages, or omit {option}")  # fmt: skip
        for name, divisor in (("pipeline", self.pipeline), ("virtual_stages", per_rank)):
            if divisor is not None and num_stages % divisor:
                raise RuleError("not_divisible", f"has {num_stages} stages, which {name} (={divisor}) must divide",
                                "list a number of layers for each virtual stage")  # fmt: skip
        return self

    @property
    def num_virtual_stages(self) -> int | None:
        """Virtual stages per pipeline rank that `virtual_stages` or the schedule sets; None if the planner chooses."""
        if self.schedule == "zb_v":
            return VIRTUAL_STAGES_OF_ZB_V
        return 1 if self.schedule in ("gpipe", "1f1b", "zero_bubble") else self.virtual_stages

    @property
    def min_virtual(self) -> int:
        """Fewest virtual stages per pipeline rank that the schedule, or overlap, allows."""
        return self.num_virtual_stages or (2 if self.overlap or self.schedule == "interleaved" else 1)

    @model_validator(mode="after")
    def _check_effect(self) -> "ParallelSpec":
        if (self.virtual_stages or 1) > 1 and self.pipeline == 1:
            raise RuleError("not_applicable",
                            f"has virtual_stages (={self.virtual_stages}) with pipeline (=1), which has no stages",
                            "raise pipeline, or omit virtual_stages")  # fmt: skip
        for name in ("schedule", "stages"):
            if (value := getattr(self, name)) is not None and self.pipeline == 1:
                value = format_stages(value) if name == "stages" else value
                raise RuleError("not_applicable", f"has {name} (={value!r}) with pipeline (=1), which has no stages",
                                f"raise pipeline, or omit {name}")  # fmt: skip
        if self.context_exchange is not None and self.context == 1:
            raise RuleError("not_applicable",
                            f"has context_exchange (={self.context_exchange!r}) with context (=1), a single rank",
                            "raise context, or omit context_exchange")  # fmt: skip
        if self.sharding is not None and self.fsdp == self.expert_fsdp == 1:
            raise RuleError("not_applicable",
                            f"has sharding (={self.sharding!r}), but nothing is sharded: fsdp and expert_fsdp are 1",
                            "raise one of them, or omit sharding")  # fmt: skip
        return self

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {} if value == "auto" else value
