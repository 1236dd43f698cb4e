"""Shares of experts by label (source, role or language) at one evaluation, the most specialized layers first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.records import LabelLayerRecord
from service.control.report.event_text import time_text
from service.control.report.expert_loads import MAX_EXPERTS, experts_per_bucket, step_records
from service.control.store.database import Database

DIGITS = 5


@dataclass(frozen=True)
class _Layer:
    number: int
    choices: NDArray[np.float64]
    """`[labels]`"""
    shares: NDArray[np.float64]
    """`[labels, E]`: rows sum to 1, or to 0 without choices."""

    @classmethod
    def from_record(cls, record: LabelLayerRecord, num_labels: int) -> "_Layer | None":
        """None for a record that cannot be one of these labels."""
        widths = {len(load) for load in record.load}
        if len(record.load) != num_labels or len(widths) != 1 or not 0 < max(widths) <= MAX_EXPERTS:
            return None
        if any(not 0 <= count < 2**53 for load in record.load for count in load):
            return None
        load = np.array(record.load, dtype=np.float64)
        choices = load.sum(axis=1)
        return cls(record.layer, choices, load / np.maximum(choices, 1.0)[:, None])

    @property
    def num_experts(self) -> int:
        return int(self.shares.shape[1])

    @property
    def specialization(self) -> float:
        """Total variation distance of a label's shares from the mean of all labels, mean over labels."""
        shares = self.shares[self.choices > 0]
        if not len(shares):
            return 0.0
        return round(float(np.abs(shares - shares.mean(axis=0)).sum(axis=1).mean() / 2), DIGITS)

    def summary(self) -> dict[str, Any]:
        return {"layer": self.number, "num_experts": self.num_experts, "specialization": self.specialization}

    def to_plain(self, max_experts: int) -> dict[str, Any]:
        width = experts_per_bucket(self.num_experts, max_experts)
        padded = np.pad(self.shares, ((0, 0), (0, -self.num_experts % width)))
        return {
            "layer": self.number,
            "num_experts": self.num_experts,
            "experts_per_bucket": width,
            "choices": [int(number) for number in self.choices],
            "shares": padded.reshape(len(padded), -1, width).sum(axis=2).round(DIGITS).tolist(),
        }


def label_shares(
    database: Database,
    job_number: int,
    event_ids: Sequence[int],
    layers: Sequence[int],
    max_layers: int,
    max_experts: int,
) -> dict[str, Any]:
    """Shares at the step of this metric event, if there is one. Every layer has a summary, the most specialized first;
    the first `max_layers`, or `layers`, also have their shares. Of more than `max_experts` experts, neighbours share a
    bucket, which has the sum of their shares."""
    for row, record in step_records(database, job_number, event_ids):
        if (loads := record.label_loads) is None:
            continue
        candidates = (_Layer.from_record(layer, len(loads.labels)) for layer in loads.layers)
        by_layer = {layer.number: layer for layer in candidates if layer is not None}
        ordered = sorted(by_layer.values(), key=lambda layer: (-layer.specialization, layer.number))
        selected = [by_layer[number] for number in layers if number in by_layer] or ordered
        return {
            "step": record.step,
            "time": time_text(row.time),
            "kind": loads.kind,
            "labels": list(loads.labels),
            "layers": [layer.summary() for layer in ordered],
            "shares": [layer.to_plain(max_experts) for layer in selected[:max_layers]],
        }
    return {"step": None, "time": None, "kind": None, "labels": [], "layers": [], "shares": []}
