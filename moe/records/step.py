"""Records of one step of training: what it found over the global batch, and how long it took."""

import math
from dataclasses import dataclass

from moe.records.json_record import JsonRecord

HeldOutLosses = dict[str, float | None]
"""Nats a target token by held-out set; None where a set is empty."""


@dataclass(frozen=True)
class LayerRecord(JsonRecord):
    """Routing and exchange of one MoE layer in one step, over the global batch."""

    layer: int
    load: tuple[int, ...]
    """Kept choices of each expert."""
    max_over_mean: float | None = None
    """Load of the busiest expert over the mean of all."""
    rejected: float | None = None
    """Share of choices that the router's policy rejected."""
    dropped: float | None = None
    """Share of choices for which there was no capacity."""
    entropy: float | None = None
    """Nats of the router's probabilities, the mean over tokens."""
    aux_loss: float | None = None
    z_loss: float | None = None
    all_to_all_bytes: int | None = None
    """Bytes that all ranks sent, forward and backward."""
    all_to_all_s: float | None = None
    """Seconds of waiting for rows, the mean over ranks."""
    waiting_s: float | None = None
    """Seconds of waiting for other ranks to come, the mean over ranks."""


@dataclass(frozen=True)
class StepRecord(JsonRecord):
    """Values of one step, the data of a `metric` event. None: not a number, or of a release that had no such value."""

    step: int = 0
    """Steps finished with this one: the first is 1."""
    loss: float | None = None
    """Nats a target token, smoothed, with the auxiliary losses by their coefficients."""
    nll: float | None = None
    """Nats a target token."""
    aux_loss: float | None = None
    """Mean of the MoE layers'."""
    z_loss: float | None = None
    """Mean of the MoE layers'."""
    layers: tuple[LayerRecord, ...] = ()
    """Records of the MoE layers, in the order of the model."""
    grad_norm: float | None = None
    """Global norm of all gradients, before it was clipped."""
    lr: float | None = None
    tokens: int | None = None
    """Real tokens of the batch, without padding."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    data_s: float | None = None
    """Seconds of the step spent waiting for its batch."""
    time: str | None = None
    """RFC 3339, UTC, by the clock of rank 0."""
    held_out: HeldOutLosses | None = None
    """Losses at steps after which the model was evaluated along the way."""

    numbers: dict[str, float | None] | None = None
    """Further scalars that a user's module returns beside its loss, by name."""

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite numbers: where not, the model must not be updated."""
        return all(value is not None and math.isfinite(value) for value in (self.loss, self.grad_norm))
