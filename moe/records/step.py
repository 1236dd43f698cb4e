"""Records of a run: training steps, committed checkpoints, data preparation."""

import math
from dataclasses import dataclass
from typing import Literal

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class PreparationRecord(JsonRecord):
    """Progress of data preparation, in the `preparing` field of a `log` event."""

    stage: str = ""
    """Name of the stage, for display."""
    share: float | None = None
    """Finished share of the preparation, 0 to 1; None if unknown."""
    num_done: int = 0
    """Texts finished in this stage."""
    seconds: float = 0.0
    """Seconds since the preparation began."""

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time at the pace so far; None without an estimate."""
        if self.share is None or self.share <= 0.0:
            return None
        return self.seconds * (1 - self.share) / self.share

    def in_words(self) -> str:
        """`preparing data: encoding, 42%`; without a share, `preparing data: encoding, 12,000 texts`."""
        progress = f", {self.num_done:,} texts" if self.num_done else ""
        return f"preparing data: {self.stage}" + (progress if self.share is None else f", {self.share:.0%}")


@dataclass(frozen=True)
class CheckpointRecord(JsonRecord):
    """Committed checkpoint: the data of a `checkpoint` event. None: the writing release had no such field."""

    step: int = 0
    """Finished steps."""
    name: str | None = None
    """Folder name under `checkpoints/`."""
    url: str | None = None
    size_bytes: int | None = None
    num_files: int | None = None
    stall_s: float | None = None
    """Seconds that training was blocked."""
    write_s: float | None = None
    """Seconds of writing in the background, until the commit."""
    time: str | None = None
    """RFC 3339, UTC, by rank 0's clock."""


@dataclass(frozen=True)
class StoredCheckpoint(JsonRecord):
    """Stored checkpoint of a job, from its marker; without the optional fields if it has a fault."""

    name: str
    step: int
    attempt: int
    group: int
    path: str
    fault: str | None
    created_at: str | None = None
    """RFC 3339, UTC."""
    num_workers: int | None = None
    num_files: int | None = None
    size_bytes: int | None = None
    best: bool | None = None
    """Whether it is that of the job's best evaluation."""


HeldOutLosses = dict[str, float | None]
"""Nats per target token, or DPO loss per pair, by held-out set; None for an empty set."""


@dataclass(frozen=True)
class LayerRecord(JsonRecord):
    """Routing and all-to-all of one MoE layer in one step, over the global batch."""

    layer: int
    load: tuple[int, ...]
    """Accepted choices of each expert."""
    max_over_mean: float | None = None
    """Largest expert load divided by the mean load."""
    rejected: float | None = None
    """Share of choices rejected by the router's policy."""
    dropped: float | None = None
    """Share of choices dropped for lack of capacity."""
    entropy: float | None = None
    """Entropy of the router's probabilities in nats, mean over tokens."""
    aux_loss: float | None = None
    z_loss: float | None = None
    all_to_all_bytes: int | None = None
    """Bytes sent by all ranks, forward and backward."""
    all_to_all_s: float | None = None
    """Seconds of waiting for rows, mean over ranks. A GPU's waits that end after the host has launched the step count
    in the next step; so do those of `waiting_s`."""
    waiting_s: float | None = None
    """Seconds of waiting for other ranks to arrive, mean over ranks."""


@dataclass(frozen=True)
class Sample(JsonRecord):
    """A prompt of `train.evaluation.prompts`, and the model's completion at that step."""

    prompt: str
    completion: str


LabelKind = Literal["source", "language", "part", "role"]
"""`role`: of a source, the tokens of messages of one role. `part`: of a source, its answers or its prompts, in records
of earlier releases."""


@dataclass(frozen=True)
class LabelLayerRecord(JsonRecord):
    """Expert loads of one MoE layer by label."""

    layer: int
    load: tuple[tuple[int, ...], ...]
    """Accepted choices of each expert, by label."""


@dataclass(frozen=True)
class LabelLoads(JsonRecord):
    """Expert loads by label of the held-out tokens of one evaluation, over all ranks: which sources, roles or
    languages go to which experts."""

    kind: LabelKind
    labels: tuple[str, ...]
    layers: tuple[LabelLayerRecord, ...]
    """MoE layers in model order."""


@dataclass(frozen=True)
class HeldOutResult:
    """Result of a periodic evaluation on held-out sets."""

    losses: HeldOutLosses
    label_loads: LabelLoads | None = None
    """None without MoE layers or without two labels."""


@dataclass(frozen=True)
class StepRecord(JsonRecord):
    """Values of one step: the data of a `metric` event.

    None: not a number, or the writing release had no such field.
    """

    step: int = 0
    """Finished steps including this one; the first is 1."""
    loss: float | None = None
    """Nats per target token, label-smoothed, plus the weighted auxiliary losses."""
    nll: float | None = None
    """Nats per target token."""
    aux_loss: float | None = None
    """Mean over the MoE layers."""
    z_loss: float | None = None
    """Mean over the MoE layers."""
    indexer_loss: float | None = None
    """KL divergence of the indexers of sparse attention in nats per token, mean over their layers; None if they have no
    loss."""
    layers: tuple[LayerRecord, ...] = ()
    """MoE layers in model order."""
    grad_norm: float | None = None
    """Global norm of all gradients, before clipping."""
    lr: float | None = None
    tokens: int | None = None
    """Tokens in the batch, without padding."""
    source_tokens: dict[str, int] | None = None
    """Tokens of streamed data up to this step, by source; None for prepared data."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    data_s: float | None = None
    """Seconds of waiting for the batch."""
    memory_bytes: int | None = None
    """Bytes that torch's allocator held on rank 0's GPU when the step was recorded; without a GPU, its process's
    resident bytes."""
    time: str | None = None
    """RFC 3339, UTC, by rank 0's clock."""
    held_out: HeldOutLosses | None = None
    """Losses of the periodic evaluation, at steps that have one."""
    samples: tuple[Sample, ...] | None = None
    """Completions of the periodic evaluation's prompts, at steps that have one."""
    label_loads: LabelLoads | None = None
    """Expert loads by label of the periodic evaluation, at steps that have one."""

    numbers: dict[str, float | None] | None = None
    """Further scalars of a user module or a preference loss, by name; None if not finite, or a mean of nothing."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite; if not, the update must be skipped."""
        return all(value is not None and math.isfinite(value) for value in (self.loss, self.grad_norm))
