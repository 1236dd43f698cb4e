"""The plan: layout of one job, with predictions and reasons."""

from collections.abc import Iterator
from dataclasses import fields
from math import fsum
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from moe.plan.candidate import Candidate, Options
from moe.plan.degrees import Degrees
from moe.plan.module_layout import ModuleLayout
from moe.plan.money import MoneyEstimate
from moe.plan.placement import Placement
from moe.plan.profile import ProfileName
from moe.plan.software import SoftwareName
from moe.spec.base import Count, CountOrZero, Frozen, Spec
from moe.spec.errors import Problem, SpecError


class MemoryEstimate(Frozen):
    """Predicted bytes on the fullest device, by kind."""

    parameters: CountOrZero
    gradients: CountOrZero
    optimizer: CountOrZero
    activations: CountOrZero
    """Saved for the backward pass, of all micro-batches in flight."""
    dispatch: CountOrZero
    """Rows sent to experts and back, and activations inside experts."""
    workspace: CountOrZero = 0
    """Temporary tensors of one layer's backward pass."""
    logits: CountOrZero
    communication: CountOrZero
    """Flat gradient buffers, parameters gathered by FSDP, and pipeline buffers."""
    staging: CountOrZero
    """Copy for asynchronous checkpoint writes; in host memory with a GPU."""
    allowance: CountOrZero = 0
    """Reserved for the framework and fragmentation."""
    limit: CountOrZero

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    @property
    def job_bytes(self) -> int:
        """Bytes without the allowance."""
        return self.total - self.allowance

    @property
    def margin(self) -> int:
        """Free bytes, allowance included; at least the allowance if the job fits."""
        return self.limit - self.job_bytes

    def by_kind(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in type(self).model_fields if kind != "limit"}


class TimeEstimate(Frozen):
    """Predicted seconds of one step, by kind."""

    products_s: float = 0.0
    attention_s: float = 0.0
    """Scores and the weighted sum of values."""
    routing_s: float = 0.0
    """Router scores; gather and weighted sum of rows."""
    elementwise_s: float = 0.0
    """Memory-bound: norms, activation functions, residuals."""
    launches_s: float = 0.0
    """Host time, independent of the amount of work."""
    all_to_all_s: float = 0.0
    """Dispatch and combine."""
    gather_s: float = 0.0
    """All-gathers and reduce-scatters of tensor and context ranks and FSDP."""
    send_s: float = 0.0
    bubble_s: float = 0.0
    all_reduce_s: float = 0.0
    optimizer_s: float = 0.0
    data_s: float = 0.0
    """Waiting for the next batch, prepared during the step."""
    hidden_s: float = 0.0
    """Overlapped collectives; not part of the step."""
    module_s: float = 0.0
    """Computation and collectives of a user's module, predicted together."""

    @model_serializer(mode="wrap")
    def _omit_unset_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `module_s` if it is 0: older clients reject unknown keys."""
        values: dict[str, Any] = handler(self)
        if not self.module_s:
            values.pop("module_s", None)
        return values

    @property
    def step_s(self) -> float:
        return fsum(self.by_kind().values())  # rounded once: `sum` rounds differently across Python releases

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind, without `hidden_s`."""
        return {kind: getattr(self, kind) for kind in type(self).model_fields if kind != "hidden_s"}


class RunnerUp(Frozen):
    """A layout that was not chosen, and why."""

    layout: dict[str, bool | int | str] = Field(default_factory=dict)
    """Degrees above 1 and options, as fields of `parallel`."""
    expert: Count
    data: Count
    why_not: str
    step_s: float | None = None
    memory_bytes: CountOrZero | None = None
    not_yet: tuple[str, ...] = ()
    predicted: TimeEstimate | None = None
    """None in plans of earlier releases, which have only totals."""
    memory: MemoryEstimate | None = None


class Measurement(Frozen):
    """Measured step of a run of the plan."""

    num_steps: Count
    """Latest recorded steps, without the first of each worker group."""
    step_s: float
    """Median."""
    tokens_per_s: float
    """All positions, padding included."""


class Trial(Frozen):
    """A layout that was run for a few steps before the choice."""

    layout: dict[str, bool | int | str]
    predicted_step_s: float
    measured_step_s: float


class BlockShare(Frozen):
    """Parameters of identical layers, and their placement."""

    block: str
    count: Count
    parameters: Count
    """Sum over all of these layers."""
    placement: str
    bytes_per_device: CountOrZero
    """Parameter bytes on the stage's fullest rank."""


class FewestWorkers(Frozen):
    """Fewest workers of one kind of cluster, one per device, that hold a job; None if no number does."""

    in_any_layout: Count | None
    """Including layouts that cannot be run yet."""
    to_run: Count | None


class MadeFor(Frozen):
    """Digests of the planner and its inputs."""

    spec: str
    cluster: str
    calibration: str | None = None
    planner: str


_OMITTED_IF_EMPTY = (
    "module", "money", "pool", "peak_flops_per_s", "ends_s", "fewest", "num_billed_devices", "missing", "defaults",
)  # fmt: skip
"""Optional fields of a plan that are not stored if empty."""


class Plan(Spec):
    """Layout of a job, planned or written by hand, with predictions.

    Raises SpecError if the degrees do not multiply to the number of workers.
    """

    version: Literal[3] = 3
    num_workers: Count
    degrees: Degrees
    options: Options = Options()
    profile: ProfileName = "ours"
    """Executor: ours, a peer's (Megatron-Core) or torchtitan's."""
    software: SoftwareName | None = None
    """Source of host times and sustained rates; None in plans of earlier releases."""
    placements: tuple[Placement, ...] | None = None
    """None in plans of earlier releases: they follow from spec and degrees."""
    device: Literal["cpu", "cuda", "tpu"]
    device_type: str
    memory: MemoryEstimate
    predicted: TimeEstimate
    tokens_per_step: Count
    flops_per_step: float = 0.0
    """Model FLOPs, forward and backward, without recomputation and weight gradients of frozen weights."""
    peak_flops_per_s: float | None = None
    """Dense data-sheet peak of a device in the job's dtype; None if unknown."""
    ends_s: tuple[float, float] | None = None
    """Step time at the fast and slow end of the software's spread; None if equal."""
    fewest: FewestWorkers | None = None
    """Set on request, or if the plan cannot be run."""
    num_steps: Count | None = None
    money: MoneyEstimate | None = None
    num_billed_devices: Count | None = None
    """In whole billing units; None if equal to the number of workers."""
    pool: str | None = None
    """Pool of the job, if the cluster has several."""
    reasons: tuple[str, ...]
    not_yet: tuple[str, ...] = ()
    """Features that cannot be run yet; empty if runnable."""
    blocks: tuple[BlockShare, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    ruled_out: tuple[str, ...] = ()
    made_for: MadeFor | None = None
    missing: tuple[str, ...] = ()
    """Inputs that a run needs and the job lacks, such as weights: it can be planned, not submitted."""
    defaults: dict[str, str] = Field(default_factory=dict)
    """Unset values that affect speed and memory, by spec path."""
    tried: tuple[Trial, ...] = ()
    """Measured layouts, this one the fastest, if `parallel.auto` is `measured`."""
    measured: Measurement | None = None
    module: ModuleLayout | None = None
    """Sharding of a user's module; all ranks have the same batch, as tensor ranks do."""

    @model_validator(mode="before")
    @classmethod
    def _convert_earlier_versions(cls, values: Any) -> Any:
        """Convert versions 1 and 2, with degrees and options at the top level; version 1 also had fewer kinds of
        time. Drop `stages`, which plans on several pools had."""
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if name != "stages"}
        version = values.get("version")
        if version not in (1, 2) or isinstance(version, bool):  # True equals 1
            return values
        values = {"max_rows" if name == "most_rows" else name: value for name, value in values.items()}
        old, predicted = {"arithmetic_s": "products_s"}, values.get("predicted")
        if version == 1 and isinstance(predicted, dict):
            values["predicted"] = {old.get(k, k): s for k, s in predicted.items()}
        for name, part in (("degrees", Degrees), ("options", Options)):
            names = [field.name for field in fields(part) if field.name in values]
            values[name] = {key: values.pop(key) for key in names}
        not_yet = values.get("not_yet")
        if isinstance(not_yet, list | tuple) and "language models" in not_yet:
            values["profile"] = "peer"
        return {**values, "version": 3}

    @model_serializer(mode="wrap")
    def _omit_unset_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit optional fields that are empty: older clients reject unknown keys."""
        values: dict[str, Any] = handler(self)
        for name in _OMITTED_IF_EMPTY:
            if not getattr(self, name):
                values.pop(name, None)
        for name in ("schedule", "stages", "context_exchange"):
            if getattr(self.options, name) == getattr(Options(), name):
                values["options"].pop(name, None)
        return values

    @model_validator(mode="after")
    def _check_degrees(self) -> "Plan":
        if problems := [*self._mesh_problems(), *self._dispatch_problems()]:
            raise SpecError(problems)
        return self

    def _mesh_problems(self) -> Iterator[Problem]:
        """Problems of degrees that do not divide the workers."""
        degrees = self.degrees
        if degrees.num_workers != self.num_workers:
            factors = (
                f"expert_tensor (={degrees.expert_tensor}), data (={degrees.data}) and pipeline (={degrees.pipeline})"
            )
            yield Problem("mismatch", "degrees.expert", degrees.expert,
                          f"times {factors} must be num_workers (={self.num_workers})",
                          f"use {degrees.num_workers} workers, or other degrees")  # fmt: skip
        stage_workers, split_ranks = self.num_workers // degrees.pipeline, degrees.tensor * degrees.context
        if stage_workers % split_ranks:
            yield Problem("not_divisible", "degrees.tensor", degrees.tensor,
                          f"times context (={degrees.context}) must divide the ranks of a stage (={stage_workers})",
                          "use one of its divisors")  # fmt: skip
        elif (replica_ranks := stage_workers // degrees.tensor) % degrees.fsdp:
            yield Problem("not_divisible", "degrees.fsdp", degrees.fsdp,
                          f"must divide the data and context ranks (={replica_ranks}): a stage's (={stage_workers}) "
                          f"without tensor (={degrees.tensor})",
                          "use one of their divisors")  # fmt: skip
        if degrees.data % degrees.expert_fsdp:
            yield Problem("not_divisible", "degrees.expert_fsdp", degrees.expert_fsdp,
                          f"must divide data (={degrees.data})", "use one of its divisors")  # fmt: skip

    def _dispatch_problems(self) -> Iterator[Problem]:
        """Problems of hierarchical dispatch over nodes that split an expert or an expert group unevenly."""
        degrees, per_node = self.degrees, self.options.ranks_per_node
        group_ranks = degrees.expert * degrees.expert_tensor
        if per_node and group_ranks % per_node:
            yield Problem("not_divisible", "options.ranks_per_node", per_node,
                          f"must divide the ranks of an expert group (={group_ranks})",
                          "omit it, or use another expert degree")  # fmt: skip
        elif per_node and per_node % degrees.expert_tensor:
            yield Problem("not_divisible", "options.ranks_per_node", per_node,
                          f"must be a multiple of expert_tensor (={degrees.expert_tensor}), since an expert stays on "
                          "one node",
                          "use a smaller expert_tensor degree")  # fmt: skip

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.degrees, self.options)

    @property
    def billed_devices(self) -> int:
        return self.num_billed_devices or self.num_workers

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axes of the experts, outermost first, then other degrees above 1; a module's own axes."""
        if self.module is not None:
            return dict(self.module.mesh)
        split = {axis: degree for axis, degree in vars(self.degrees).items() if degree > 1}
        return {"expert_data": self.degrees.data, "expert": self.degrees.expert,
                **{axis: degree for axis, degree in split.items() if axis not in ("data", "expert")}}  # fmt: skip

    @property
    def tokens_per_s(self) -> float:
        """Predicted throughput; of a module, rows of its batch."""
        return self.tokens_per_step / self.predicted.step_s

    @property
    def flops_per_s_per_device(self) -> float:
        """Model FLOP/s per worker."""
        return self.flops_per_step / self.predicted.step_s / self.num_workers

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU): share of the dense peak; None if the peak is unknown."""
        if not self.peak_flops_per_s or not self.flops_per_step:
            return None
        return self.flops_per_s_per_device / self.peak_flops_per_s
