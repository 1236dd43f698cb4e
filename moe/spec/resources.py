"""Resources of a job: workers, parallelism degrees, checkpoints, retries."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Spec
from moe.spec.errors import RuleError

DeviceKind = Literal["cuda", "cpu"]
"""Device types that workers train on, as torch names them."""


def _no_look_alike(value: Any) -> Any:
    """Refuse `true` and 1.0, which equal 1 but are not numbers of GPUs."""
    if isinstance(value, bool | float):
        raise RuleError("wrong_type", "must be auto, 0 or 1", "write it as a whole number")
    return value


class ResourcesSpec(Spec):
    """Number of workers, one accelerator each; `num_workers`, or a range to choose from at launch."""

    num_workers: Count | None = Field(default=None, le=100_000)
    min_workers: Count | None = Field(default=None, le=100_000)
    max_workers: Count | None = Field(default=None, le=100_000)
    gpus_per_worker: Annotated[Literal["auto", 0, 1], BeforeValidator(_no_look_alike)] = "auto"
    """`auto`: one where the cluster has GPUs, none where it has not."""
    cpus_per_worker: Count = 1
    device: Literal["auto", "cpu"] = "auto"
    """Device of workers. `auto`: the GPU that each holds, or its cores where it holds none; a worker that holds a GPU
    and finds none ends. `cpu`: its cores in any case, also where a cluster has GPUs in its books only."""

    @model_validator(mode="after")
    def _one_way(self) -> "ResourcesSpec":
        has_range = self.min_workers is not None or self.max_workers is not None
        if has_range and self.num_workers is not None:
            raise RuleError(
                "conflict",
                "names num_workers and a range",
                "leave min_workers and max_workers out, or num_workers",
            )
        if has_range and (self.min_workers is None or self.max_workers is None):
            raise RuleError("missing", "names half a range", "give both min_workers and max_workers")
        if (
            self.min_workers is not None
            and self.max_workers is not None
            and self.min_workers > self.max_workers
        ):
            raise RuleError(
                "out_of_range",
                f"has min_workers (={self.min_workers}) above max_workers (={self.max_workers})",
                "swap them",
            )
        return self

    def trains_on(self, gpus_per_worker: int) -> DeviceKind:
        """Device type of workers with this many GPUs."""
        return "cuda" if gpus_per_worker and self.device == "auto" else "cpu"

    @property
    def min_num_workers(self) -> int:
        return self.num_workers or self.min_workers or 1

    @property
    def max_num_workers(self) -> int:
        return self.num_workers or self.max_workers or 1


class ParallelSpec(Spec):
    """Degrees that the planner must keep to; those left out it chooses. The word `auto` leaves out all."""

    auto: Literal["predicted", "measured"] = "predicted"
    """Whether the plan of the fastest predicted step is run, or the three fastest for five steps each, and then the
    one that was measured to be the fastest."""
    expert: Count | None = None
    """Ranks that the experts of a layer are spread over."""
    data: Count | None = None
    """Replicas of each expert."""
    tensor: Count | None = None
    """Ranks that attention heads and feed-forward layers without experts are split over."""
    context: Count | None = None
    """Ranks that each sequence is split over. Planned only."""
    pipeline: Count | None = None
    """Stages of consecutive layers. More than one is planned only."""
    virtual_stages: Count | None = None
    """Runs of layers that each pipeline stage has, so that less of it waits (arXiv 2104.04473, section 2.2)."""
    fsdp: Count | None = None
    """Ranks that each parameter outside experts is sharded over."""
    sharding: Literal["optimizer", "gradients", "parameters"] | None = None
    """State that the ranks of `fsdp` and `expert_fsdp` shard: the optimizer's, gradients too, or parameters
    too, to be gathered where they are used (stages 1 to 3 of arXiv 1910.02054). The first two are planned only."""
    expert_tensor: Count | None = None
    """Ranks that the hidden dimension of each expert is split over."""
    expert_fsdp: Count | None = None
    """Of the replicas of an expert, how many its parameters are sharded over."""
    dispatch: Literal["flat", "hierarchical"] | None = None
    """Way of rows where experts are spread over several nodes: straight to the rank of their expert, or a token
    once to each node where it has experts, and within it from there. Flat when left out."""
    num_chunks: Count | None = None
    """Chunks that rows travel to experts in, so that exchange and arithmetic overlap."""
    overlap: StrictBool | None = None
    """Whether the rows of one micro-batch travel while another one is worked on, in turns that end where blocks
    exchange: so these are not computed again as a whole. Planned only."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Recomputation in the backward pass: nothing, hidden states of feed-forward layers and experts, or whole
    blocks."""
    micro_batch_groups: Count | None = None
    """Groups that one rank runs forward and backward at a time."""

    @model_validator(mode="after")
    def _in_turns(self) -> "ParallelSpec":
        if self.overlap and self.recompute == "full":
            raise RuleError(
                "conflict",
                "has overlap (=True) with recompute (='full'), which computes whole blocks again at once",
                "use recompute selective, or leave overlap out",
            )
        if self.overlap and (self.num_chunks or 1) > 1:
            raise RuleError(
                "conflict",
                f"has overlap (=True) with num_chunks (={self.num_chunks}), and exchanges hide behind one thing only",
                "leave one of them out",
            )
        if self.overlap and self.expert == self.expert_tensor == 1:
            raise RuleError(
                "not_applicable",
                "has overlap (=True) where expert and expert_tensor are 1 and no rows travel",
                "leave overlap out",
            )
        if self.overlap and (self.pipeline or 1) > 1 and self.virtual_stages == 1:
            raise RuleError(
                "conflict",
                f"has overlap (=True) with virtual_stages (=1) in a pipeline (={self.pipeline}), whose micro-batches "
                "take turns between virtual stages",
                "use 2 or more, or leave overlap out",
            )
        return self

    @model_validator(mode="after")
    def _of_something(self) -> "ParallelSpec":
        if (self.virtual_stages or 1) > 1 and self.pipeline == 1:
            raise RuleError(
                "not_applicable",
                f"has virtual_stages (={self.virtual_stages}) with pipeline (=1), which has no stages",
                "raise pipeline, or leave virtual_stages out",
            )
        if self.sharding is not None and self.fsdp == self.expert_fsdp == 1:
            raise RuleError(
                "not_applicable",
                f"has sharding (={self.sharding!r}) where fsdp and expert_fsdp are 1 and nothing is cut up",
                "raise one of them, or leave sharding out",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {} if value == "auto" else value


class CheckpointSpec(Spec):
    every_steps: Count = 100
    keep: Count = 3
    """Committed checkpoints that stay on storage; the last is always among them."""


FailureKind = Literal["error", "out_of_memory", "lost", "hung", "driver"]
"""`error`: a worker raised an exception. `out_of_memory`: a worker reported it. `lost`: a worker's process or node
died. `hung`: a worker was ended because it was stopped or nobody made progress. `driver`: the job's driver died or
failed."""


class Backoff(Spec):
    """Time before another try, longer with each failure since the last checkpoint."""

    first_s: NonNegative = Field(default=1.0, le=86_400)
    factor: float = Field(default=2.0, strict=True, ge=1, le=100)
    max_s: NonNegative = Field(default=60.0, le=604_800)

    @model_validator(mode="after")
    def _in_order(self) -> "Backoff":
        if self.first_s > self.max_s:
            raise RuleError(
                "out_of_range",
                f"has first_s (={self.first_s:g}) above max_s (={self.max_s:g})",
                "raise max_s",
            )
        return self

    def wait_s(self, num_failures: int) -> float:
        """Seconds to wait after this many earlier failures."""
        return min(self.max_s, self.first_s * self.factor ** min(num_failures, 100))


class RetryRule(Spec):
    """Retries after failures of one kind; what is left out is as for the others."""

    max_failures: CountOrZero | None = Field(default=None, le=100)
    """Failures of this kind before the job fails, counted alone; 0 for none."""
    backoff: Backoff | None = None


class RetrySpec(Spec):
    max_failures: CountOrZero = 3
    """Dead worker groups or drivers that are made anew before the job fails, counted since its last checkpoint: one
    that is committed forgives what came before. Kinds with a limit of their own are not counted here."""
    backoff: Backoff | None = None
    """Wait before another try, during which the job holds nothing on the cluster. Without one, a worker group restarts
    at once, and a driver after 1 s, then after twice as long each time, up to a minute."""
    kinds: dict[FailureKind, RetryRule] = Field(default_factory=dict)
    """Rules of their own for kinds of failures."""

    def backoff_of(self, kind: str) -> Backoff | None:
        """Backoff for failures of a kind."""
        rule = self._rule(kind)
        return rule.backoff if rule is not None and rule.backoff is not None else self.backoff

    def own_limit(self, kind: str) -> int | None:
        """Limit of a kind counted separately; None if it shares `max_failures`."""
        rule = self._rule(kind)
        return None if rule is None else rule.max_failures

    def _rule(self, kind: str) -> RetryRule | None:
        return next((rule for name, rule in self.kinds.items() if name == kind), None)


class LogsSpec(Spec):
    """Retention of the output and log lines of a job's driver and workers."""

    max_bytes: Count = Field(default=268_435_456, ge=1_000_000)
    """Largest size of the stored log, all processes together. The oldest lines go first, and a line says where."""
