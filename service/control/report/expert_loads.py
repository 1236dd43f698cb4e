"""Expert loads of a job over time: layers by experts, the worst-balanced layers first, of bounded size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from pydantic_core import from_json

from moe.records import LayerRecord, StepRecord
from service.control.report.event_text import time_text
from service.control.store.database import Database
from service.control.store.events import EventRow, events_by_id

ROWS_AT_ONCE = 8
"""Records in memory at once: that of a large model has a megabyte."""
MAX_EXPERTS = 1 << 16
DIGITS = 3


@dataclass
class _Layer:
    """One MoE layer over the sampled steps."""

    num_experts: int
    steps: list[int] = field(default_factory=list)
    load: list[list[float]] = field(default_factory=list)
    """By sampled step: loads of each bucket's busiest expert, as multiples of the mean over all experts."""
    max_over_mean: list[float] = field(default_factory=list)
    total: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    dropped: float | None = None
    entropy: float | None = None

    def add(self, step: int, record: LayerRecord, experts_per_bucket: int) -> None:
        load = np.asarray(record.load, dtype=np.float64)
        mean = load.mean()
        relative = load / mean if mean > 0 else load
        padded = np.pad(relative, (0, -len(relative) % experts_per_bucket))
        self.steps.append(step)
        self.load.append(padded.reshape(-1, experts_per_bucket).max(axis=1).round(DIGITS).tolist())
        self.max_over_mean.append(round(float(relative.max()), DIGITS))
        self.total = load if not len(self.total) else self.total + load
        self.dropped, self.entropy = record.dropped, record.entropy

    def summary(self, number: int) -> dict[str, Any]:
        return {
            "layer": number,
            "num_experts": self.num_experts,
            "max_over_mean": round(sum(self.max_over_mean) / len(self.max_over_mean), DIGITS),
            "newest_max_over_mean": self.max_over_mean[-1],
            "num_unused": int((self.total == 0).sum()),
            "dropped": self.dropped,
            "entropy": self.entropy,
        }


def expert_loads(
    database: Database,
    job_number: int,
    event_ids: Sequence[int],
    layers: Sequence[int],
    max_layers: int,
    max_experts: int,
) -> dict[str, Any]:
    """Loads at the steps of these metric events. Every layer has a summary, by falling imbalance (the mean of
    `max_over_mean` over these steps); the first `max_layers`, or `layers`, also have their loads. Of more than
    `max_experts` experts, neighbours share a bucket, which has the load of its busiest expert."""
    by_layer: dict[int, _Layer] = {}
    steps: list[dict[str, Any]] = []
    for row, record in step_records(database, job_number, event_ids):
        if not record.layers:
            continue
        steps.append({"step": record.step, "time": time_text(row.time)})
        for layer_record in record.layers:
            num_experts = len(layer_record.load)
            if not 0 < num_experts <= MAX_EXPERTS or not 0 <= min(layer_record.load) <= max(layer_record.load) < 2**53:
                continue
            layer = by_layer.get(layer_record.layer)
            if layer is None or layer.num_experts != num_experts:
                layer = by_layer[layer_record.layer] = _Layer(num_experts)
            layer.add(record.step, layer_record, experts_per_bucket(num_experts, max_experts))
    summaries = sorted((layer.summary(number) for number, layer in by_layer.items()),
                       key=lambda summary: (-summary["max_over_mean"], summary["layer"]))  # fmt: skip
    selected = [number for number in layers if number in by_layer] or [row["layer"] for row in summaries[:max_layers]]
    return {
        "steps": steps,
        "layers": summaries,
        "loads": [
            {
                "layer": number,
                "num_experts": by_layer[number].num_experts,
                "experts_per_bucket": experts_per_bucket(by_layer[number].num_experts, max_experts),
                "steps": by_layer[number].steps,
                "load": by_layer[number].load,
                "max_over_mean": by_layer[number].max_over_mean,
            }
            for number in selected[:max_layers]
        ],
    }


def experts_per_bucket(num_experts: int, max_experts: int) -> int:
    """Neighbouring experts that share a bucket, so that there are at most `max_experts` buckets."""
    return -(-num_experts // max_experts)


def step_records(database: Database, job_number: int, ids: Sequence[int]) -> Iterator[tuple[EventRow, StepRecord]]:
    """Metric events in order of steps, with their records, a few at a time; without unreadable ones."""
    for start in range(0, len(ids), ROWS_AT_ONCE):
        portion = ids[start : start + ROWS_AT_ONCE]
        with database.read() as tx:
            rows = {row.id: row for row in events_by_id(tx, job_number, portion)}
        for id in portion:
            if id in rows:
                try:
                    yield rows[id], StepRecord.read(from_json(rows[id].data))
                except ValidationError:
                    continue
