"""Resources of a job: workers, checkpoints, retries."""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moe.spec.base import Count, CountOrZero, NonNegative, Spec, Text
from moe.spec.errors import RuleError, SpecError
from moe.spec.plain_values import first_problem

DeviceKind = Literal["cuda", "cpu"]
"""Device types that workers train on, as torch names them."""


_KUBERNETES_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


def _kubernetes_name(name: str) -> str:
    if not _KUBERNETES_NAME.fullmatch(name):
        raise RuleError("invalid_value", "must be the name of a Kubernetes object",
                        "use lower-case letters, digits, '-' and '.'")  # fmt: skip
    return name


KubernetesName = Annotated[Text, Field(max_length=63), AfterValidator(_kubernetes_name)]


def _check_plain(template: Any) -> Any:
    """Refuse what JSON cannot express, since the spec is stored as JSON."""
    if (problem := first_problem(template, "")) is not None:
        raise SpecError(replace(problem, path=problem.path.lstrip(".")))
    return template


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
    cluster: Literal["own", "shared"] | None = None
    """On Kubernetes: a Ray cluster of the job's own, or one that stands for all jobs, if the operator offers both.
    Default: the operator's choice."""
    queue: KubernetesName | None = None
    """Kueue's LocalQueue, one of those that the operator lists. Default: the operator's."""
    priority: KubernetesName | None = None
    """Kueue's WorkloadPriorityClass, one of those that the operator lists. Default: the operator's."""
    pod_template: Annotated[dict[str, Any], BeforeValidator(_check_plain)] | None = None
    """`metadata` and `spec` that are merged into the pods of the job's own cluster, if the operator allows it."""

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
