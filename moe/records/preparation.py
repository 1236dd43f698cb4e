"""Progress record of data preparation."""

from dataclasses import dataclass

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
