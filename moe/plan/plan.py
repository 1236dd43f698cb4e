"""The plan: how one job will be laid out, frozen, with its predictions and its reasons."""

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
    """Values that the backward pass needs of the micro-batches in flight."""
    dispatch: CountOrZero
    """Tokens on their way to experts and back, and inside experts."""
    workspace: CountOrZero = 0
    """Values that the backward pass of one layer has for a while."""
    logits: CountOrZero
    communication: CountOrZero
    """Gradients laid end to end for their all-reduce, what FSDP has gathered at a time, and what stages pass on."""
    staging: CountOrZero
    """The copy that a checkpoint is written from while training goes on; on a GPU it lies in the host's memory."""
    allowance: CountOrZero = 0
    """Left free for the framework and for what its allocator fragments."""
    limit: CountOrZero
    """Memory of the device."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    @property
    def needed(self) -> int:
        """Bytes that the job itself takes, without the allowance for the framework and fragmentation."""
        return self.total - self.allowance

    @property
    def margin(self) -> int:
        """Bytes of the device that the job leaves free; at least the allowance where it fits."""
        return self.limit - self.needed

    def by_kind(self) -> dict[str, int]:
        return {kind: getattr(self, kind) for kind in type(self).model_fields if kind != "limit"}


class TimeEstimate(Frozen):
    """Predicted seconds of one step, by kind: a prediction, to be read beside what is measured."""

    products_s: float = 0.0
    """Matrix products."""
    attention_s: float = 0.0
    """Scores and the weighing of values."""
    routing_s: float = 0.0
    """Scores of experts, and rows gathered and added up again."""
    elementwise_s: float = 0.0
    """Norms, activations, residuals: by their bytes."""
    launches_s: float = 0.0
    """Time that no amount of work shortens."""
    all_to_all_s: float = 0.0
    """Rows on their way to experts and back."""
    gather_s: float = 0.0
    """Gathers and scatters of tensor and context ranks, and of FSDP."""
    send_s: float = 0.0
    """Seconds of sends between pipeline stages."""
    bubble_s: float = 0.0
    """Stages waiting for others."""
    all_reduce_s: float = 0.0
    """Gradients over replicas."""
    optimizer_s: float = 0.0
    data_s: float = 0.0
    """Waiting for the next batch, which is made ready beside the step."""
    hidden_s: float = 0.0
    """Collectives behind arithmetic: no part of the step's time."""
    module_s: float = 0.0
    """Arithmetic and collectives of a user's module, which are predicted together."""

    @model_serializer(mode="wrap")
    def _without_what_others_do_not_know(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Times of this library's models are read by clients that know nothing of users' modules."""
        values: dict[str, Any] = handler(self)
        if not self.module_s:
            values.pop("module_s", None)
        return values

    @property
    def step_s(self) -> float:
        return fsum(self.by_kind().values())  # rounded once: releases of Python differ in how `sum` does it

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind, without hidden ones."""
        return {kind: getattr(self, kind) for kind in type(self).model_fields if kind != "hidden_s"}


class RunnerUp(Frozen):
    """A layout that was considered and not chosen, and why."""

    layout: dict[str, bool | int | str] = Field(default_factory=dict)
    """Degrees beyond 1 and options, as `parallel` takes them."""
    expert: Count
    data: Count
    why_not: str
    step_s: float | None = None
    memory_bytes: CountOrZero | None = None
    not_yet: tuple[str, ...] = ()
    """Parts of it that cannot be run yet."""
    predicted: TimeEstimate | None = None
    """Seconds by kind, as `memory` has bytes. Plans of earlier releases tell of sums alone."""
    memory: MemoryEstimate | None = None


class Measurement(Frozen):
    """Measured step of a run under a plan."""

    num_steps: Count
    """The newest recorded steps that the figures are of, without the first of each worker group."""
    step_s: float
    """Median of the steps' seconds."""
    tokens_per_s: float
    """Positions per second, padding included, as the plan counts them."""


class Trial(Frozen):
    """A layout that was run for a few steps before one of them was chosen."""

    layout: dict[str, bool | int | str]
    predicted_step_s: float
    measured_step_s: float


class BlockShare(Frozen):
    """The parameters of layers that are alike, and where they are."""

    block: str
    count: Count
    parameters: Count
    """Number of parameters of all blocks of the kind."""
    placement: str
    bytes_per_device: CountOrZero
    """Held on the fullest rank of its stage, parameters alone."""


class StagePlace(Frozen):
    """One pipeline stage of a plan on several pools."""

    pool: str
    device_type: str
    units: Count
    """Layers, and embeddings and head as one each."""
    micro_batch_s: float
    """Predicted seconds of a micro-batch, forward and backward."""
    memory_bytes: CountOrZero
    """Predicted of its fullest device, allowance included."""
    limit_bytes: CountOrZero
    """Memory of such a device."""


class FewestWorkers(Frozen):
    """Fewest workers of a kind of cluster, one per device, that hold a job; None where no number does."""

    in_any_layout: Count | None
    """Fewest workers in any layout, including layouts that cannot be run yet."""
    to_run: Count | None
    """Fewest workers in a layout that can be run."""


class MadeFor(Frozen):
    """Digests of what a plan was made for."""

    spec: str
    cluster: str
    calibration: str | None = None
    planner: str


class Plan(Spec):
    """The layout of a job, from the planner or by hand: degrees, options and placements, and what is predicted of it.

    Raises SpecError where the degrees do not multiply to the number of workers.
    """

    version: Literal[3] = 3
    num_workers: Count
    degrees: Degrees
    options: Options = Options()
    profile: ProfileName = "ours"
    """Executor that runs it: ours, a peer's (Megatron-Core) or torchtitan's."""
    software: SoftwareName | None = None
    """Software whose host times and sustained rates it was priced by. Plans of earlier releases do not say."""
    placements: tuple[Placement, ...] | None = None
    """Placement of each parameter. Plans of earlier releases have none: they follow from spec and degrees."""
    device: Literal["cpu", "cuda", "tpu"]
    device_type: str
    memory: MemoryEstimate
    predicted: TimeEstimate
    tokens_per_step: Count
    flops_per_step: float = 0.0
    """FLOPs of the model, forward and backward: no gradients of frozen weights, and nothing of recomputation."""
    peak_flops_per_s: float | None = None
    """Dense data-sheet rate of a device in the job's dtype; None where not known."""
    ends_s: tuple[float, float] | None = None
    """Seconds of a step at the faster and the slower end of what is known of the software; None where both are one."""
    fewest: FewestWorkers | None = None
    """Sizes of this kind of cluster that hold the job; set where asked for or where the plan cannot be run."""
    num_steps: Count | None = None
    """Number of steps of the job."""
    money: MoneyEstimate | None = None
    """Price of the plan, if the cluster has one."""
    num_billed_devices: Count | None = None
    """Devices that are billed for it, in whole billing units; None where each has a worker."""
    pool: str | None = None
    """The pool that it lies on, of a cluster of several."""
    stages: tuple[StagePlace, ...] = ()
    """Its pipeline stages in order, where they lie on several pools; their slowest is what `predicted` tells of, and
    their fullest what `memory` does."""
    reasons: tuple[str, ...]
    not_yet: tuple[str, ...] = ()
    """Parts of it that cannot be run yet; empty where it can be run."""
    blocks: tuple[BlockShare, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    """The next best, the fastest first."""
    ruled_out: tuple[str, ...] = ()
    made_for: MadeFor | None = None
    missing: tuple[str, ...] = ()
    """Needs of a run that the job does not name, such as a model's weights: it can be planned, and not be submitted."""
    defaults: dict[str, str] = Field(default_factory=dict)
    """Values that the job leaves out and that decide its speed and memory, by their place."""
    tried: tuple[Trial, ...] = ()
    """The layouts among which this one was measured to be the fastest, where `parallel.auto` is `measured`."""
    measured: Measurement | None = None
    """Beside what was predicted, once the plan has been run."""
    module: ModuleLayout | None = None
    """Where the tensors of a user's module lie. All ranks then have the same batch, as tensor ranks do."""

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, values: Any) -> Any:
        """Versions 1 and 2 had degrees and options beside the rest, the first one fewer kinds of time."""
        version = values.get("version") if isinstance(values, dict) else None
        if version not in (1, 2) or isinstance(version, bool):  # True equals 1
            return values
        values = {"max_rows" if name == "most_rows" else name: value for name, value in values.items()}
        old, then = {"arithmetic_s": "products_s"}, values.get("predicted")
        if version == 1 and isinstance(then, dict):
            values["predicted"] = {old.get(k, k): s for k, s in then.items()}
        for name, part in (("degrees", Degrees), ("options", Options)):
            names = [field.name for field in fields(part) if field.name in values]
            values[name] = {key: values.pop(key) for key in names}
        not_yet = values.get("not_yet")
        if isinstance(not_yet, list | tuple) and "language models" in not_yet:
            values["profile"] = "peer"
        return {**values, "version": 3}

    @model_serializer(mode="wrap")
    def _without_what_others_do_not_know(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans of this library's models on one kind of nodes, without a price, are read by clients that know of
        nothing else."""
        values: dict[str, Any] = handler(self)
        for name in (
            "module",
            "money",
            "pool",
            "stages",
            "peak_flops_per_s",
            "ends_s",
            "fewest",
            "num_billed_devices",
            "missing",
            "defaults",
        ):
            if not getattr(self, name):
                values.pop(name, None)
        return values

    @model_validator(mode="after")
    def _multiplies(self) -> "Plan":
        of, options = self.degrees, self.options
        in_experts, problems = of.num_workers, []
        if in_experts != self.num_workers:
            factors = f"expert_tensor (={of.expert_tensor}), data (={of.data}) and pipeline (={of.pipeline})"
            problems.append(
                Problem(
                    "mismatch",
                    "degrees.expert",
                    of.expert,
                    f"times {factors} must be num_workers (={self.num_workers})",
                    f"use {in_experts} workers, or other degrees",
                )
            )
        in_stage, together = self.num_workers // of.pipeline, of.tensor * of.context
        if in_stage % together:
            problems.append(
                Problem(
                    "not_divisible",
                    "degrees.tensor",
                    of.tensor,
                    f"times context (={of.context}) must divide the ranks of a stage (={in_stage})",
                    "use a divisor of them",
                )
            )
        elif (replica_ranks := in_stage // of.tensor) % of.fsdp:
            problems.append(
                Problem(
                    "not_divisible",
                    "degrees.fsdp",
                    of.fsdp,
                    f"must divide the data and context ranks (={replica_ranks}), those "
                    f"of a stage (={in_stage}) over tensor (={of.tensor})",
                    "use a divisor of them",
                )
            )
        if of.data % of.expert_fsdp:
            problems.append(
                Problem("not_divisible", "degrees.expert_fsdp", of.expert_fsdp, f"must divide data (={of.data})",
                        "use a divisor of it")
            )  # fmt: skip
        per_node = options.ranks_per_node
        if per_node and (of.expert * of.expert_tensor) % per_node:
            problems.append(
                Problem("not_divisible", "options.ranks_per_node", per_node,
                        f"must divide the ranks of an expert group (={of.expert * of.expert_tensor})",
                        "leave it out, or use another expert degree")
            )  # fmt: skip
        elif per_node and per_node % of.expert_tensor:
            problems.append(
                Problem("not_divisible", "options.ranks_per_node", per_node,
                        f"must be a multiple of expert_tensor (={of.expert_tensor}): an expert lives on a node",
                        "use a smaller expert_tensor degree")
            )  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self

    @property
    def candidate(self) -> Candidate:
        """Candidate with the plan's degrees and options."""
        return Candidate(self.degrees, self.options)

    @property
    def billed_devices(self) -> int:
        """Devices that are billed for it."""
        return self.num_billed_devices or self.num_workers

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools that it lies on, in the order of its stages; none of a cluster of one kind."""
        if self.stages:
            return tuple(dict.fromkeys(stage.pool for stage in self.stages))
        return () if self.pool is None else (self.pool,)

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axes of the experts, outermost first, and beside them what else is split; a module's own axes."""
        if self.module is not None:
            return dict(self.module.mesh)
        beside = {axis: degree for axis, degree in vars(self.degrees).items() if degree > 1}
        return {"expert_data": self.degrees.data, "expert": self.degrees.expert,
                **{axis: degree for axis, degree in beside.items() if axis not in ("data", "expert")}}  # fmt: skip

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second; for a module, rows of its batch."""
        return self.tokens_per_step / self.predicted.step_s

    @property
    def flops_per_s_per_device(self) -> float:
        """FLOP/s of the model for each worker, published elsewhere as TFLOP/s a GPU."""
        return self.flops_per_step / self.predicted.step_s / self.num_workers

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU): the share of the device's dense peak that the model's operations reach; None
        where no peak is known."""
        if not self.peak_flops_per_s or not self.flops_per_step:
            return None
        return self.flops_per_s_per_device / self.peak_flops_per_s
