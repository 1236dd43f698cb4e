"""Evaluation report of a user module."""

from dataclasses import dataclass

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class ModuleReport(JsonRecord):
    """Evaluation of a trained user module. Without `loss`: not a report of this task."""

    num_steps: int = 0
    loss: float | None = None
    """Loss on the batch after the last of `train.num_steps`, not used in training."""
    numbers: dict[str, float | None] | None = None
    """Other scalars that the module returned with that loss, by name; None if not finite."""
