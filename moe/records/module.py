"""Report of a finished run of a user's module."""

from dataclasses import dataclass

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class ModuleReport(JsonRecord):
    """Measurements of a trained module. Without `loss`: not a report of this task."""

    num_steps: int = 0
    loss: float | None = None
    """Loss of the batch after the last of `train.num_steps`, which it was not trained on."""
    numbers: dict[str, float | None] | None = None
    """Other scalars that the module returned with that loss, by name; None if not finite."""
