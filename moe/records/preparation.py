"""Record of how far the preparation of a run's data has come."""

from dataclasses import dataclass

from moe.records.json_record import JsonRecord


@dataclass(frozen=True)
class PreparationRecord(JsonRecord):
    """Progress of preparing data, in the `preparing` field of a `log` event."""

    stage: str = ""
    """Name of the stage, in words."""
    share: float | None = None
    """Share of the whole that is done, between 0 and 1; None where nobody knows it."""
    num_done: int = 0
    """Texts that the stage has done."""
    seconds: float = 0.0
    """Time since it began."""

    @property
    def seconds_left(self) -> float | None:
        """Estimate at the pace so far; None before there is one."""
        if self.share is None or self.share <= 0.0:
            return None
        return self.seconds * (1 - self.share) / self.share

    def in_words(self) -> str:
        """`preparing data: encoding, 42%`; without a share, `preparing data: encoding, 12,000 texts`."""
        progress = f", {self.num_done:,} texts" if self.num_done else ""
        return f"preparing data: {self.stage}" + (progress if self.share is None else f", {self.share:.0%}")
