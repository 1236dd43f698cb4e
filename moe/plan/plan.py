"""The plan: how one job will be laid out, frozen, with its predictions and its reasons."""

from math import fsum
from typing import Any, Literal

from pydantic import Field, model_validator

from moe.plan.degrees import Degrees
from moe.spec.base import Count, CountOrZero, Frozen, Spec
from moe.spec.errors import Problem, SpecError


class MemoryEstimate(Frozen):
    """Predicted bytes on the fullest device, by kind."""

    parameters: CountOrZero
    gradients: CountOrZero
    optimizer: CountOrZero
    activations: CountOrZero
    """What the backward pass needs of the micro-batches in flight."""
    dispatch: CountOrZero
    """Tokens on their way to experts and back, and inside experts."""
    workspace: CountOrZero = 0
    """What the backward pass of one layer holds for a while."""
    logits: CountOrZero
    communication: CountOrZero
    """Gradients laid end to end for their all-reduce, what FSDP has gathered at a time, and what stages pass on."""
    staging: CountOrZero
    """The copy that a checkpoint is written from while training goes on; on a GPU it lies in the host's memory."""
    allowance: CountOrZero = 0
    """Left to the framework and to fragmentation."""
    limit: CountOrZero
    """What the device has."""

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

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
    """What no amount of work shortens."""
    all_to_all_s: float = 0.0
    """Rows on their way to experts and back."""
    gather_s: float = 0.0
    """Gathers and scatters of tensor and context ranks, and of FSDP."""
    send_s: float = 0.0
    """From pipeline stage to stage."""
    bubble_s: float = 0.0
    """Stages waiting for others."""
    all_reduce_s: float = 0.0
    """Gradients over replicas."""
    optimizer_s: float = 0.0
    data_s: float = 0.0
    """Waiting for the next batch, which is made ready beside the step."""
    hidden_s: float = 0.0
    """Collectives behind arithmetic: no part of the step's time."""

    @property
    def step_s(self) -> float:
        return fsum(self.by_kind().values())  # rounded once: releases of Python differ in how `sum` does it

    def by_kind(self) -> dict[str, float]:
        """Without what is hidden."""
        return {kind: getattr(self, kind) for kind in type(self).model_fields if kind != "hidden_s"}


class RunnerUp(Frozen):
    """A layout that was considered and not chosen, and why."""

    layout: dict[str, bool | int | str] = Field(default_factory=dict)
    """Its degrees beyond 1 and its options, as `parallel` takes them."""
    expert: Count
    data: Count
    why_not: str
    step_s: float | None = None
    memory_bytes: CountOrZero | None = None
    not_yet: tuple[str, ...] = ()
    """What of it cannot be run yet."""


class Measurement(Frozen):
    """What was measured of a run under a plan."""

    num_steps: Count
    """The newest recorded steps that the figures are of, without the first of each worker group."""
    step_s: float
    """Their median."""
    tokens_per_s: float
    """Of all positions of a step, padding included, as the plan counts them."""


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
    """Of all of them together."""
    placement: str
    bytes_per_device: CountOrZero
    """Held on the fullest rank of its stage, parameters alone."""


class MadeFor(Frozen):
    """Digests of what a plan was made for."""

    spec: str
    cluster: str
    calibration: str | None = None
    planner: str


class Plan(Spec):
    """The layout of a job, from the planner or by hand.

    The same ranks are folded into two meshes: (data, tensor) for all parameters but those of experts, and
    (expert-data, expert, expert-tensor) for these. Ranks are numbered with the last axis of each running fastest, so
    that the ranks of one tensor or expert group are consecutive and share a node where nodes hold enough of them.

    Raises SpecError where the degrees do not multiply to the number of workers.
    """

    version: Literal[2] = 2
    num_workers: Count
    pipeline: Count = 1
    """Stages of consecutive layers; the meshes are those of one stage."""
    virtual_stages: Count = 1
    """Runs of layers that each stage has."""
    context: Count = 1
    """Ranks that each sequence is split over."""
    tensor: Count = 1
    """Ranks that attention heads and feed-forward layers without experts are split over. In all other layers each of
    them works on its share of their tokens."""
    fsdp: Count = 1
    """Data ranks that each parameter outside experts is cut up over, to be gathered where it is used: 1 replicates it
    on all, as many as there are data ranks is FSDP, between the two is HSDP."""
    sharding: Literal["optimizer", "gradients", "parameters"] = "parameters"
    """What is cut up over `fsdp` and `expert_fsdp` ranks: the optimizer's state, gradients too, or parameters too."""
    expert: Count
    """Ranks that the experts of each layer are spread over."""
    expert_tensor: Count = 1
    """Ranks that the hidden dimension of each expert is split over."""
    data: Count
    """Ranks that have to do with the same parts of experts: expert-data."""
    expert_fsdp: Count = 1
    """Of those, ranks that each parameter of an expert is cut up over."""
    num_chunks: Count = 1
    """Chunks that rows travel to experts in, so that exchange and arithmetic overlap."""
    overlap: bool = False
    """Whether the rows of one micro-batch travel while another one is worked on."""
    most_rows: Count | None = None
    """Rows of a chunk that a rank takes from others at most: where more are routed to its experts, there are more
    chunks. Left out, there is no bound."""
    ranks_per_node: Count | None = None
    """Where given, expert groups that span nodes of so many ranks send a token to another node only once, however
    many of its experts live there."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass: nothing, the hidden states of feed-forward layers and experts, or
    whole blocks."""
    micro_batch_groups: Count
    """Groups that one data rank runs forward and backward at a time."""
    num_micro_batches: Count
    """The same on every rank: those with fewer groups take part in the collectives without any."""
    device: Literal["cpu", "cuda", "tpu"]
    device_type: str
    memory: MemoryEstimate
    predicted: TimeEstimate
    tokens_per_step: Count
    flops_per_step: float = 0.0
    """Of the model, forward and backward, without what is computed again."""
    num_steps: Count | None = None
    """That the job takes."""
    reasons: tuple[str, ...]
    not_yet: tuple[str, ...] = ()
    """What of it cannot be run yet; empty where it can be run."""
    blocks: tuple[BlockShare, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    """The next best, the fastest first."""
    ruled_out: tuple[str, ...] = ()
    made_for: MadeFor | None = None
    tried: tuple[Trial, ...] = ()
    """The layouts among which this one was measured to be the fastest, where `parallel.auto` is `measured`."""
    measured: Measurement | None = None
    """Beside what was predicted, once the plan has been run."""

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, given: Any) -> Any:
        """Version 1 had fewer kinds of time."""
        version = given.get("version") if isinstance(given, dict) else None
        if version != 1 or isinstance(version, bool):  # True equals 1
            return given
        old, then = {"arithmetic_s": "products_s"}, given.get("predicted")
        predicted = {old.get(k, k): s for k, s in then.items()} if isinstance(then, dict) else then
        return {**given, "version": 2, "predicted": predicted}

    @model_validator(mode="after")
    def _multiplies(self) -> "Plan":
        in_experts = self.expert * self.expert_tensor * self.data * self.pipeline
        problems = []
        if in_experts != self.num_workers:
            others = (
                f"expert_tensor (={self.expert_tensor}), data (={self.data}) and pipeline (={self.pipeline})"
            )
            problems.append(
                Problem("expert", self.expert, f"times {others} must be num_workers (={self.num_workers})",
                        f"use {in_experts} workers, or other degrees")
            )  # fmt: skip
        in_stage, together = self.num_workers // self.pipeline, self.tensor * self.context
        if in_stage % together:
            problems.append(
                Problem("tensor", self.tensor, f"times context (={self.context}) must divide the ranks of a stage "
                        f"(={in_stage})", "use a divisor of them")
            )  # fmt: skip
        elif (data_ranks := in_stage // together) % self.fsdp:
            problems.append(
                Problem("fsdp", self.fsdp, f"must divide the data ranks (={data_ranks}), those of a stage "
                        f"(={in_stage}) over tensor (={self.tensor}) and context (={self.context})",
                        "use a divisor of them")
            )  # fmt: skip
        if self.data % self.expert_fsdp:
            problems.append(
                Problem(
                    "expert_fsdp", self.expert_fsdp, f"must divide data (={self.data})", "use a divisor of it"
                )
            )
        if self.ranks_per_node and (self.expert * self.expert_tensor) % self.ranks_per_node:
            problems.append(
                Problem("ranks_per_node", self.ranks_per_node,
                        f"must divide the ranks of an expert group (={self.expert * self.expert_tensor})",
                        "leave it out, or use another expert degree")
            )  # fmt: skip
        elif self.ranks_per_node and self.ranks_per_node % self.expert_tensor:
            problems.append(
                Problem("ranks_per_node", self.ranks_per_node,
                        f"must be a multiple of expert_tensor (={self.expert_tensor}): an expert lives on a node",
                        "use a smaller expert_tensor degree")
            )  # fmt: skip
        if problems:
            raise SpecError(problems)
        return self

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axes of the experts, outermost first, and beside them what else is split."""
        names = ("expert_fsdp", "expert_tensor", "tensor", "context", "fsdp", "pipeline")
        beside = {name: getattr(self, name) for name in names}
        shown = {axis: degree for axis, degree in beside.items() if degree > 1}
        return {"expert_data": self.data, "expert": self.expert, **shown}

    @property
    def degrees(self) -> Degrees:
        return Degrees(
            expert=self.expert, data=self.data, tensor=self.tensor, fsdp=self.fsdp, expert_tensor=self.expert_tensor,
            expert_fsdp=self.expert_fsdp, context=self.context, pipeline=self.pipeline,
        )  # fmt: skip

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.predicted.step_s

    @property
    def flops_per_s_per_device(self) -> float:
        """Of the model, each worker: what is published as TFLOP/s a GPU."""
        return self.flops_per_step / self.predicted.step_s / self.num_workers
