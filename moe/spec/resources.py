"""Resources of a job: workers, parallelism degrees, checkpoints, retries."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Spec, Text
from moe.spec.errors import RuleError

DeviceKind = Literal["cuda", "cpu"]
"""Device types that workers train on, as torch names them."""


def _check_gpus(value: Any) -> Any:
    """Refuse `true` and 1.0, which equal 1 but are not valid."""
    if isinstance(value, bool | float):
        raise RuleError("wrong_type", "must be auto, 0 or 1", "write it as a whole number")
    return value


class ResourcesSpec(Spec):
    """Number of workers, with one accelerator each: `num_workers`, or a range to choose from at launch."""

    num_workers: Count | None = Field(default=None, le=100_000)
    min_workers: Count | None = Field(default=None, le=100_000)
    max_workers: Count | None = Field(default=None, le=100_000)
    gpus_per_worker: Annotated[Literal["auto", 0, 1], BeforeValidator(_check_gpus)] = "auto"
    """`auto`: 1 if the cluster has GPUs, else 0."""
    cpus_per_worker: Count = 1
    device: Literal["auto", "cpu"] = "auto"
    """`auto`: the GPU assigned to a worker, or CPU cores if none is; a worker that does not find its GPU fails. `cpu`:
    CPU cores, even if the cluster lists GPUs."""

    @model_validator(mode="after")
    def _check_range(self) -> "ResourcesSpec":
        has_range = self.min_workers is not None or self.max_workers is not None
        if has_range and self.num_workers is not None:
            raise RuleError(
                "conflict", "has both num_workers and a range", "omit min_workers and max_workers, or num_workers"
            )
        if has_range and (self.min_workers is None or self.max_workers is None):
            raise RuleError("missing", "has half a range", "set both min_workers and max_workers")
        if self.min_workers is not None and self.max_workers is not None and self.min_workers > self.max_workers:
            raise RuleError("out_of_range",
                            f"has min_workers (={self.min_workers}) above max_workers (={self.max_workers})",
                            "swap them")  # fmt: skip
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
    """Context parallelism: ranks that split each sequence. Planned only."""
    pipeline: Count | None = None
    """Pipeline stages of consecutive layers. More than one is planned only."""
    virtual_stages: Count | None = None
    """Model chunks per pipeline stage, to shrink the pipeline bubble (arXiv 2104.04473, section 2.2)."""
    fsdp: Count | None = None
    """FSDP: ranks that shard each parameter outside experts."""
    sharding: Literal["optimizer", "gradients", "parameters"] | None = None
    """State sharded over `fsdp` and `expert_fsdp` ranks: optimizer state, gradients too, or parameters too (ZeRO stages
    1 to 3, arXiv 1910.02054), which are gathered where they are used. The first two are planned only."""
    expert_tensor: Count | None = None
    """Tensor parallelism within experts: ranks that split each expert's hidden dimension."""
    expert_fsdp: Count | None = None
    """FSDP of experts: ranks that shard each expert parameter, among its `data` replicas."""
    dispatch: Literal["flat", "hierarchical"] | None = None
    """Dispatch to experts on several nodes. `flat` sends each row to its expert's rank; `hierarchical` sends a token
    once to each node that has experts for it, then within the node."""
    num_chunks: Count | None = None
    """Chunks of dispatched rows, to overlap all-to-all and computation."""
    overlap: StrictBool | None = None
    """Whether one micro-batch's all-to-all overlaps another's computation. Micro-batches alternate within blocks, so
    that whole blocks cannot be recomputed. Planned only."""
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
        return self

    @model_validator(mode="after")
    def _check_effect(self) -> "ParallelSpec":
        if (self.virtual_stages or 1) > 1 and self.pipeline == 1:
            raise RuleError("not_applicable",
                            f"has virtual_stages (={self.virtual_stages}) with pipeline (=1), which has no stages",
                            "raise pipeline, or omit virtual_stages")  # fmt: skip
        if self.sharding is not None and self.fsdp == self.expert_fsdp == 1:
            raise RuleError("not_applicable",
                            f"has sharding (={self.sharding!r}), but nothing is sharded: fsdp and expert_fsdp are 1",
                            "raise one of them, or omit sharding")  # fmt: skip
        return self

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {} if value == "auto" else value


class BestCheckpointSpec(Spec):
    """Metric that decides which checkpoint of a run is the best: a held-out loss of the periodic evaluation."""

    metric: Annotated[Text, Field(pattern=r"^held_out(\..+)?$", max_length=300)] = "held_out"
    """`held_out`: mean over all held-out sets. `held_out.NAME`: one of them."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""

    @property
    def held_out_set(self) -> str | None:
        """Name of the held-out set; None for the mean over all."""
        return self.metric.removeprefix("held_out").removeprefix(".") or None


class CheckpointSpec(Spec):
    every_steps: Count = 100
    keep: Count = 3
    """Number of committed checkpoints kept in storage, including the last one."""
    keep_best: BestCheckpointSpec | None = None
    """Commit a checkpoint whenever a periodic evaluation is better than all before it, and keep the best one in
    addition to `keep`. `shardyard export JOB@best` exports it. Default: none."""


FailureKind = Literal["error", "out_of_memory", "lost", "hung", "driver"]
"""`error`: a worker raised an exception. `out_of_memory`: a worker reported it. `lost`: a worker's process or node
died. `hung`: a worker was terminated because it was stopped or no worker made progress. `driver`: the job's driver died
or failed."""


class Backoff(Spec):
    """Delay before a retry, longer with each failure since the last checkpoint."""

    first_s: NonNegative = Field(default=1.0, le=86_400)
    factor: float = Field(default=2.0, strict=True, ge=1, le=100)
    max_s: NonNegative = Field(default=60.0, le=604_800)

    @model_validator(mode="after")
    def _check_order(self) -> "Backoff":
        if self.first_s > self.max_s:
            raise RuleError(
                "out_of_range", f"has first_s (={self.first_s:g}) above max_s (={self.max_s:g})", "raise max_s"
            )
        return self

    def wait_s(self, num_failures: int) -> float:
        """Seconds to wait after this many earlier failures."""
        return min(self.max_s, self.first_s * self.factor ** min(num_failures, 100))


class RetryRule(Spec):
    """Retries after failures of one kind; unset fields use the general rule."""

    max_failures: CountOrZero | None = Field(default=None, le=100)
    """Failures of this kind that are retried, counted separately; 0 for none."""
    backoff: Backoff | None = None


class RetrySpec(Spec):
    max_failures: CountOrZero = 3
    """Failures of worker groups or drivers that are retried, counted since the last committed checkpoint; the next one
    fails the job. Kinds with their own limit are not counted."""
    backoff: Backoff | None = None
    """Delay before a retry, during which no cluster resources are held. Default: none for a worker group; for a driver
    1 s, doubled each time up to 60 s."""
    kinds: dict[FailureKind, RetryRule] = Field(default_factory=dict)
    """Rules for kinds of failures."""

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
    """Retention of the output and logs of a job's driver and workers."""

    max_bytes: Count = Field(default=268_435_456, ge=1_000_000)
    """Maximum stored log of all processes together. The oldest lines are removed first, and a line marks the gap."""
